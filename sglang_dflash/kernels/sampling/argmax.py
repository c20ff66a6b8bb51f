"""Argmax of each row of logits, a Gumbel-max draw, or both, in one read in the head's own dtype.

Fusion. The logit cap and the Gumbel noise, which turns the argmax into a draw, are applied on the
fly in fp32, so that no fp32 copy of the logits is written. Ties go to the first column, as in
torch. A row is split into parts, whose winners a second kernel compares. If both are requested, a
request without noise costs no more than its argmax.

Layout contract: logits [n, V], unit column stride; with noise, the same number of rows for each
request. NaN never wins; an all-NaN row gives 0.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.logits.reference import Noise
from sglang_dflash.kernels.logits.triton import (
    capped,
    first_index,
    gumbel,
    keep_better,
    part_bounds,
    split_rows,
    store_winner,
)

BLOCK = 4096


# fmt: off
@triton.jit(do_not_specialize=["per_request"])
def _argmax_parts(
    logits, keys, scales, values, indices, row_stride, key_stride, per_request, width, part_width,
    LOGIT_CAP: tl.constexpr, NOISE: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    scale = 0.0
    if NOISE:
        request = row // per_request
        scale = tl.load(scales + request)
        key = tl.load(keys + request * key_stride + row % per_request)
    begin, end = part_bounds(part, part_width, width)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    highest, highest_at = best, at
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + column, mask=column < end, other=float("-inf"))
        x = x.to(tl.float32)
        if BOTH:
            highest, highest_at = keep_better(x, column, highest, highest_at)
        if not BOTH or scale > 0:
            if LOGIT_CAP > 0:
                x = capped(x, LOGIT_CAP)
                x = tl.where(column < end, x, float("-inf"))
            if NOISE:  # noqa: SIM102  (NOISE is constexpr, scale a runtime value)
                if scale > 0:
                    x += scale * gumbel(key, column)
            best, at = keep_better(x, column, best, at)
    out = row * tl.num_programs(1) + part
    if BOTH:
        store_winner(highest, highest_at, values, indices, out, width)
        if scale <= 0:
            best, at = highest, highest_at
        out += tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    store_winner(best, at, values, indices, out, width)


@triton.jit
def _argmax_merge(values, indices, out, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    live = part < parts
    value = tl.load(values + row * parts + part, mask=live, other=float("-inf"))
    index = tl.load(indices + row * parts + part, mask=live, other=0)
    peak = tl.max(value, 0)
    winner = first_index(live & (value == peak), index, 2147483647, 0)
    tl.store(out + row, winner.to(tl.int64))


def argmax_rows(logits: Tensor, logit_cap: float = 0.0, noise: Noise | None = None) -> Tensor:
    """Triton version of `reference.argmax_rows`."""
    return _argmax(logits, logit_cap, noise, kinds=1)[0]


def argmax_and_sample(logits: Tensor, logit_cap: float, noise: Noise) -> Tensor:
    """Triton version of `reference.argmax_and_sample`."""
    return _argmax(logits, logit_cap, noise, kinds=2)


def _argmax(logits: Tensor, logit_cap: float, noise: Noise | None, *, kinds: int) -> Tensor:
    rows, width = logits.shape
    out = torch.empty(kinds, rows, dtype=torch.int64, device=logits.device)
    parts, part_width = split_rows(rows, width, BLOCK)
    values = torch.empty(kinds, rows, parts, dtype=torch.float32, device=logits.device)
    indices = torch.empty(kinds, rows, parts, dtype=torch.int32, device=logits.device)
    # placeholders, which are not read without noise
    keys, scales = noise or (indices[0], values[0])
    per_request = rows // scales.shape[0]
    _argmax_parts[(rows, parts)](
        *(logits, keys, scales, values, indices),
        *(logits.stride(0), keys.stride(0), per_request, width, part_width),
        LOGIT_CAP=logit_cap,
        NOISE=noise is not None,
        BOTH=kinds == 2,
        BLOCK=BLOCK,
        num_warps=8,
    )
    _argmax_merge[(kinds * rows,)](
        values, indices, out, parts, triton.next_power_of_2(parts), num_warps=1
    )
    return out
