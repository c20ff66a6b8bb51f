"""Top-k and top-p sampling from each row of logits, read in the head's own dtype.

Fusion. Plain decoding widens the logits to fp32, caps, scales and normalises them in one pass each,
and filters them in several more. Here one pass applies logit cap and temperature on the fly, and
computes the softmax sum and the maximum of each of BLOCK lanes. At least k logits reach the k-th
highest lane maximum, and few more do, because the likeliest tokens seldom share a lane; a second
pass gathers these candidates. If there are too many, the k-th logit of the whole row is found bit
by bit, one pass per bit, and the logits above it are gathered: fewer than k. A second kernel
applies both filters to the candidates and samples by Gumbel-max.

The filters are those of plain decoding: a token is kept if fewer than k tokens are likelier and
those hold less than top_p of the mass. Tied tokens are kept or dropped together, however many tie
with the k-th. Only the one of them with the most noise can be drawn, so if there are too many, that
one stands for all.

Layout contract: logits [n, V] in bf16, fp16 or fp32, unit column stride, the same number of rows
for each request; top_k at most MAX_TOP_K. NaN is never drawn.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.logits.reference import Noise
from sglang_dflash.kernels.logits.triton import capped, first_index, gumbel

BLOCK = 4096
STAGES = 4  # pipeline depth: blocks loaded ahead
# twice MAX_TOP_K: more logits seldom reach the k-th lane maximum
CANDIDATES = 256
PAIRS = 32  # candidates compared with all others at a time


@triton.jit
def _order(x, BITS: tl.constexpr):
    """Map floats to unsigned integers of the same width, preserving their order."""
    if BITS == 32:
        bits = x.to(tl.uint32, bitcast=True)
    else:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
    # a set sign bit reverses the order
    negative = (bits >> (BITS - 1)) > 0
    return tl.where(negative, bits ^ ((1 << BITS) - 1), bits | (1 << (BITS - 1)))


@triton.jit
def _is_number(x):
    x = x.to(tl.float32)
    return x == x


@triton.jit
def _load(logits, start, width, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns, their logits and their order keys (`_order`), 0 for NaN."""
    column = start + tl.arange(0, BLOCK)
    raw = tl.load(logits + column, mask=column < width, other=0.0)
    live = _is_number(raw) & (column < width)
    return column, raw, tl.where(live, _order(raw, BITS), 0)


@triton.jit
def _kth_of_lanes(best, wanted, BITS: tl.constexpr):
    """Return the highest order key that `wanted` lanes reach, 0 if there is none."""
    found = tl.full([], 0, tl.uint32)
    for step in tl.static_range(BITS):
        trial = found + (tl.full([], 1, tl.uint32) << (BITS - 1 - step))
        enough = tl.sum((best >= trial).to(tl.int32), 0) >= wanted
        found = tl.where(enough, trial, found)
    return found


# fmt: off
@triton.jit
def _kth_of_row(
    logits, width, wanted, BITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    # fmt: on
    """Return the highest order key that `wanted` logits reach."""
    found = tl.full([], 0, tl.uint32)
    for step in range(BITS):
        trial = found + (tl.full([], 1, tl.uint32) << (BITS - 1 - step))
        count = 0
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            _, _, order = _load(logits, start, width, BITS, BLOCK)
            count += tl.sum((order >= trial).to(tl.int32), 0)
        found = tl.where(count >= wanted, trial, found)
    return found


# fmt: off
@triton.jit
def _gather_from(
    threshold, logits, values, indices, width, temperature,
    BITS: tl.constexpr, LOGIT_CAP: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Store the first CANDIDATES logits that reach the threshold; return how many do."""
    gathered = 0
    # NaN has order key 0 and is never selected
    threshold = tl.maximum(threshold, 1)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        column, raw, order = _load(logits, start, width, BITS, BLOCK)
        chosen = (order >= threshold).to(tl.int32)
        here = tl.sum(chosen, 0)
        if here > 0:
            at = gathered + tl.cumsum(chosen, 0) - 1
            fits = (chosen > 0) & (at < CANDIDATES)
            tl.store(values + at, capped(raw, LOGIT_CAP) / temperature, mask=fits)
            tl.store(indices + at, column, mask=fits)
            gathered += here
    return gathered


# fmt: off
@triton.jit
def _gather_above(
    kth, logits, values, indices, width, temperature, key, is_sampled,
    BITS: tl.constexpr, LOGIT_CAP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Store the logits above the k-th, then the only one tied with it that can win; return how
    many are stored."""
    gathered = 0
    reached, value, at = float("-inf"), float("-inf"), 0
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        column, raw, order = _load(logits, start, width, BITS, BLOCK)
        x = capped(raw, LOGIT_CAP) / temperature
        above = (order > kth).to(tl.int32)
        here = tl.sum(above, 0)
        if here > 0:
            to = gathered + tl.cumsum(above, 0) - 1
            tl.store(values + to, x, mask=above > 0)
            tl.store(indices + to, column, mask=above > 0)
            gathered += here
        noisy = x
        if is_sampled:
            noisy += gumbel(key, column)
        noisy = tl.where(order == kth, noisy, float("-inf"))
        most = tl.max(noisy, 0)
        # on ties the first stays
        if most > reached:
            reached = most
            value = tl.max(tl.where(order == kth, x, float("-inf")), 0)
            at = first_index(noisy == most, column, width, 0)
    tl.store(values + gathered, value)
    tl.store(indices + gathered, at)
    return gathered + 1


# fmt: off
@triton.jit(do_not_specialize=["per_request"])
def _gather(
    logits, temperatures, top_ks, values, indices, peaks, sums, keys, scales,
    row_stride, key_stride, width, per_request,
    BITS: tl.constexpr, LOGIT_CAP: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    request = row // per_request
    logits += row * row_stride
    values += row * CANDIDATES
    indices += row * CANDIDATES
    temperature = tl.load(temperatures + request)
    wanted = tl.load(top_ks + request).to(tl.int32)

    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.uint32)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        _, raw, order = _load(logits, start, width, BITS, BLOCK)
        best = tl.maximum(best, order)
        x = tl.where(order > 0, capped(raw, LOGIT_CAP) / temperature, float("-inf"))
        higher = tl.maximum(peak, x)
        # a lane of only -inf would give exp(nan)
        seen = higher > float("-inf")
        total = tl.where(seen, total * tl.exp(peak - higher) + tl.exp(x - higher), 0.0)
        peak = higher
    highest = tl.max(peak, 0)
    tl.store(peaks + row, highest)
    tl.store(sums + row, tl.sum(total * tl.exp(peak - highest), 0))

    threshold = _kth_of_lanes(best, wanted, BITS)
    gathered = _gather_from(
        threshold, logits, values, indices, width, temperature,
        BITS, LOGIT_CAP, CANDIDATES, BLOCK, STAGES,
    )
    if gathered > CANDIDATES:
        kth = _kth_of_row(logits, width, wanted, BITS, BLOCK, STAGES)
        key = tl.load(keys + request * key_stride + row % per_request)
        is_sampled = tl.load(scales + request) > 0
        gathered = _gather_above(
            kth, logits, values, indices, width, temperature, key, is_sampled,
            # with full blocks the noise would dominate register use, and cost occupancy even for
            # rows that never get here
            BITS, LOGIT_CAP, BLOCK // 4, STAGES,
        )
    slot = tl.arange(0, CANDIDATES)
    tl.store(values + slot, float("-inf"), mask=slot >= gathered)


# fmt: off
@triton.jit(do_not_specialize=["per_request"])
def _draw(
    values, indices, peaks, sums, top_ks, top_ps, keys, scales, out, key_stride, per_request,
    CANDIDATES: tl.constexpr, PAIRS: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    request = row // per_request
    slot = tl.arange(0, CANDIDATES)
    top_k = tl.load(top_ks + request)
    peak, whole = tl.load(peaks + row), tl.load(sums + row)
    x = tl.load(values + row * CANDIDATES + slot)
    likelier = tl.zeros([CANDIDATES], tl.int32)
    before = tl.zeros([CANDIDATES], tl.float32)
    for start in range(0, CANDIDATES, PAIRS):
        other = start + tl.arange(0, PAIRS)
        y = tl.load(values + row * CANDIDATES + other)
        weight = tl.where(y > float("-inf"), tl.exp(y - peak), 0.0) / whole
        more = y[None, :] > x[:, None]
        likelier += tl.sum(more.to(tl.int32), 1)
        before += tl.sum(tl.where(more, weight[None, :], 0.0), 1)
    kept = (x > float("-inf")) & (likelier < top_k) & (before < tl.load(top_ps + request))
    index = tl.load(indices + row * CANDIDATES + slot, mask=kept, other=0)
    key = tl.load(keys + request * key_stride + row % per_request)
    if tl.load(scales + request) > 0:
        x += gumbel(key, index)
    x = tl.where(kept, x, float("-inf"))
    # ties go to the lowest token id; 0 if none is kept
    highest = x == tl.max(x, 0)
    first = first_index(highest, index, 0x7FFFFFFF, 0)
    tl.store(out + row, first.to(tl.int64))


# fmt: off
def sample_rows(
    logits: Tensor, noise: Noise, *,
    temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, logit_cap: float = 0.0,
) -> Tensor:
    # fmt: on
    """Triton version of `reference.sample_rows`."""
    rows, width = logits.shape
    per_request = rows // temperatures.shape[0]
    device = logits.device
    values = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
    indices = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)
    peaks, sums = torch.empty(2, rows, dtype=torch.float32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    _gather[(rows,)](
        *(logits, temperatures, top_ks, values, indices, peaks, sums, *noise),
        *(logits.stride(0), noise.keys.stride(0), width, per_request),
        BITS=8 * logits.element_size(),
        LOGIT_CAP=logit_cap,
        CANDIDATES=CANDIDATES,
        BLOCK=BLOCK,
        STAGES=STAGES,
        num_warps=16,
    )
    _draw[(rows,)](
        *(values, indices, peaks, sums, top_ks, top_ps, *noise, out),
        *(noise.keys.stride(0), per_request),
        CANDIDATES=CANDIDATES,
        PAIRS=PAIRS,
        num_warps=4,
    )
    return out
