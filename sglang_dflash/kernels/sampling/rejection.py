"""Block verification of sampled drafts, and the target's token after the accepted ones.

Fusion. Two passes over the target's and the drafter's logits, whose dtypes may differ: the first
computes each row's log-sum-exp by online softmax, the second the mass of the residual distribution,
a Gumbel-max draw from it, and the overlap of the two distributions. No probabilities are written to
memory. A row is split into parts; between and after the passes, one program per request merges the
parts, computes the acceptance of each prefix, and accepts or rejects the drafts.

Layout contract: logits [b, rows, V] and draft_logits [b, rows - 1, V] with unit column stride. The
number of rows, the verify width, is a runtime value: it may change from step to step. NaN has no
mass, and a request without noise is greedy. SHARED means that the requests share the rows: logits
[N, V] are packed, and of each request's drafts only the first are verified, one fewer than its
rows. Scratch has one row per row of logits.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.accept.reference import COUNT_MATCHES
from sglang_dflash.kernels.extents import aligned, padded
from sglang_dflash.kernels.logits.reference import Noise
from sglang_dflash.kernels.logits.triton import (
    LOWEST,
    first_index,
    gumbel,
    keep_better,
    merge_parts,
    part_bounds,
    scaled,
    split_rows,
    store_winner,
    sum_part,
)
from sglang_dflash.kernels.sampling.reference import FLOOR, SALT

BLOCK = 2048
_FLOOR = tl.constexpr(FLOOR)
_SALT = tl.constexpr(SALT)
_COUNT_MATCHES = tl.constexpr(COUNT_MATCHES)


@triton.jit
def _rows_of(request, bounds, rows, SHARED: tl.constexpr):
    """Return the first row of a request, and its number of rows."""
    if SHARED:
        first = tl.load(bounds + request)
        count = tl.load(bounds + request + 1) - first
    else:
        first = request * rows
        count = rows
    return first, count


@triton.jit
def _locate(at, requests, bounds, rows, SHARED: tl.constexpr):
    """Return the request of a row, its first row, and its number of rows."""
    request = tl.load(requests + at) if SHARED else at // rows
    first, count = _rows_of(request, bounds, rows, SHARED)
    return request, first, count


@triton.jit
def _first_logits(logits, request, first, request_stride, row_stride, PACKED: tl.constexpr):
    """Return where the logits of a request begin."""
    return logits + (first * row_stride if PACKED else request * request_stride)


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def _sum_parts(
    logits, scales, requests, bounds, peaks, sums, request_stride, row_stride, rows, width,
    part_width,
    PACKED: tl.constexpr, LOGIT_CAP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Store each part's maximum, and the sum of exp(x - maximum)."""
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, first, count = _locate(at, requests, bounds, rows, SHARED)
    temperature = tl.load(scales + request)
    if SHARED and not PACKED:
        # the drafter's logits: no draft follows the last row
        temperature = tl.where(at - first < count - 1, temperature, 0.0)
    if temperature > 0:
        of_request = _first_logits(logits, request, first, request_stride, row_stride, PACKED)
        begin, end = part_bounds(part, part_width, width)
        of_row = of_request + (at - first) * row_stride
        peak, total = sum_part(of_row, begin, end, temperature, LOGIT_CAP, BLOCK)
        out = at * tl.num_programs(1) + part
        tl.store(peaks + out, peak)
        tl.store(sums + out, total)


@triton.jit
def _log_sum_exp(peaks, sums, at, live):
    """Return the log-sum-exp of each row, from its parts [ROWS, PARTS]; LOWEST for no mass."""
    highest, whole = merge_parts(peaks, sums, at, live)
    return tl.where(whole > 0, highest + tl.log(whole), LOWEST)


# fmt: off
@triton.jit(do_not_specialize=["drafts_stride", "argmax_stride", "parts", "rows"])
def _prefix_acceptance(
    logits, draft_logits, drafts, argmax_drafts, scales, is_sampled, bounds,
    p_peaks, p_sums, q_peaks, q_sums, p_lses, q_lses, acceptance, argmax_ps,
    p_request_stride, p_row_stride, q_request_stride, q_row_stride, drafts_stride,
    argmax_stride, parts, rows,
    LOGIT_CAP: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):
    # fmt: on
    """Store each row's log-sum-exps, the acceptance `a` of its prefix, and the target's
    probability of the argmax draft."""
    request = tl.program_id(0).to(tl.int64)
    temperature = tl.load(scales + request)
    if temperature > 0:
        row, part = tl.arange(0, ROWS), tl.arange(0, PARTS)
        first, count = _rows_of(request, bounds, rows, SHARED)
        is_row, is_draft = row < count, row < count - 1
        live = part[None, :] < parts
        at = (first + row)[:, None] * parts + part[None, :]
        p_lse = _log_sum_exp(p_peaks, p_sums, at, live & is_row[:, None])
        if not SHARED:
            at = (request * (rows - 1) + row)[:, None] * parts + part[None, :]
        q_lse = _log_sum_exp(q_peaks, q_sums, at, live & is_draft[:, None])
        of_p = _first_logits(logits, request, first, p_request_stride, p_row_stride, SHARED)
        of_p += row * p_row_stride
        of_q = draft_logits + request * q_request_stride + row * q_row_stride
        token = tl.load(drafts + request * drafts_stride + row, mask=is_draft, other=0)
        top = tl.load(argmax_drafts + request * argmax_stride + row, mask=is_draft, other=0)
        p = scaled(tl.load(of_p + token, mask=is_draft, other=0.0), temperature, LOGIT_CAP)
        q = scaled(tl.load(of_q + token, mask=is_draft, other=0.0), temperature, LOGIT_CAP)
        x = scaled(tl.load(of_p + top, mask=is_draft, other=0.0), temperature, LOGIT_CAP)
        sampled = tl.load(is_sampled + request)
        known = is_draft & (q_lse > LOWEST) & sampled
        log_ratio = tl.where(known, tl.maximum((p - p_lse) - (q - q_lse), LOWEST), LOWEST)
        # a[i] = min(1, a[i - 1] * p / q): in log space, the prefix sum of log ratios minus its
        # running maximum
        before = (row[None, :] < row[:, None]) & is_draft[None, :]
        total = tl.sum(tl.where(before, log_ratio[None, :], 0.0), 1)
        below = row[None, :] <= row[:, None]
        highest = tl.max(tl.where(below, total[None, :], LOWEST), 1)
        a = tl.where(sampled, tl.exp(total - tl.maximum(highest, 0.0)), 1.0)
        out = first + row
        tl.store(p_lses + out, p_lse, mask=is_row)
        # a huge lse makes q = 0 in the second pass: nothing is subtracted
        tl.store(q_lses + out, tl.where(is_draft & (q_lse > LOWEST), q_lse, -LOWEST), mask=is_row)
        tl.store(acceptance + out, a, mask=is_row)
        tl.store(argmax_ps + out, tl.exp(x - p_lse), mask=is_draft)


# fmt: off
@triton.jit(do_not_specialize=["key_stride", "rows"])
def _draw_parts(
    logits, draft_logits, keys, scales, is_sampled, requests, bounds, p_lses, q_lses,
    acceptance, residual_masses, overlap_masses, values, indices,
    p_request_stride, p_row_stride, q_request_stride, q_row_stride, key_stride,
    width, part_width, rows,
    LOGIT_CAP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Store each part's residual mass, the draw from its residual, and its overlap mass."""
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, first, count = _locate(at, requests, bounds, rows, SHARED)
    row = at - first
    logits = _first_logits(logits, request, first, p_request_stride, p_row_stride, SHARED)
    logits += row * p_row_stride
    draft_logits += request * q_request_stride + row * q_row_stride
    temperature = tl.load(scales + request)
    key = tl.load(keys + request * key_stride + row) ^ _SALT
    p_lse, q_lse, a = tl.load(p_lses + at), tl.load(q_lses + at), tl.load(acceptance + at)
    sampled = tl.load(is_sampled + request)
    begin, end = part_bounds(part, part_width, width)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    residual_mass = tl.zeros([BLOCK], tl.float32)
    overlap_mass = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        live = column < end
        raw = tl.load(logits + column, mask=live, other=float("nan"))
        x = scaled(raw, tl.where(temperature > 0, temperature, 1.0), LOGIT_CAP)
        if temperature > 0:
            p = tl.exp(x - p_lse)
            has_draft = live & (row < count - 1)
            draft_raw = tl.load(draft_logits + column, mask=has_draft, other=float("nan"))
            q = tl.exp(scaled(draft_raw, temperature, LOGIT_CAP) - q_lse)
            overlap_mass += tl.minimum(p, q)
            residual = tl.maximum(a * p - tl.where(sampled, q, 0.0), 0.0)
            residual_mass += residual
            residual = tl.maximum(residual, p * _FLOOR)
            perturbed = tl.log(tl.maximum(residual, 1e-37)) + gumbel(key, column)
            x = tl.where(residual > 0, perturbed, float("-inf"))
        best, best_at = keep_better(x, column, best, best_at)
    out = at * tl.num_programs(1) + part
    store_winner(best, best_at, values, indices, out, width)
    tl.store(residual_masses + out, tl.sum(residual_mass, 0))
    tl.store(overlap_masses + out, tl.sum(overlap_mass, 0))


# fmt: off
@triton.jit(do_not_specialize=["drafts_stride", "uniforms_stride", "parts", "rows"])
def _accept_or_reject(
    drafts, uniforms, scales, is_sampled, bounds, acceptance, argmax_ps,
    residual_masses, overlap_masses, values, indices,
    choices, num_correct, advantage, drafts_stride, uniforms_stride, parts, rows,
    SHARED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):
    # fmt: on
    """Accept or reject the drafts of a request."""
    request = tl.program_id(0).to(tl.int64)
    row, part = tl.arange(0, ROWS), tl.arange(0, PARTS)
    first, count = _rows_of(request, bounds, rows, SHARED)
    is_row, is_draft = row < count, row < count - 1
    at = (first + row)[:, None] * parts + part[None, :]
    live = is_row[:, None] & (part[None, :] < parts)
    value = tl.load(values + at, mask=live, other=float("-inf"))
    index = tl.load(indices + at, mask=live, other=0)
    peak = tl.max(value, 1)
    choice = first_index(live & (value == peak[:, None]), index, 2147483647, 1)
    draft = tl.load(drafts + request * drafts_stride + row, mask=is_draft, other=-1)
    gained = tl.zeros([ROWS], tl.float32)
    kept = _COUNT_MATCHES
    if tl.load(scales + request) > 0:
        s = tl.sum(tl.load(residual_masses + at, mask=live, other=0.0), 1)
        overlap_mass = tl.sum(tl.load(overlap_masses + at, mask=live, other=0.0), 1)
        a = tl.load(acceptance + first + row, mask=is_row, other=0.0)
        argmax_p = tl.load(argmax_ps + first + row, mask=is_draft, other=0.0)
        gained = tl.where(is_draft, overlap_mass - argmax_p, 0.0)
        if tl.load(is_sampled + request):
            is_later = is_row & (row > 0)
            at_draft = request * uniforms_stride + row - 1
            uniform = tl.load(uniforms + at_draft, mask=is_later, other=1.0)
            probability = tl.where(a < 1, s / (s + 1 - a), 1.0)
            kept = tl.max(tl.where(is_later & (probability > uniform), row, 0), 0)
            choice = tl.where(row < kept, draft.to(tl.int32), choice)
    tl.store(advantage + request * (rows - 1) + row, gained, mask=row < rows - 1)
    tl.store(choices + first + row, choice.to(tl.int64), mask=is_row)
    tl.store(num_correct + request, kept)


# fmt: off
def reject_by_block(
    logits: Tensor, draft_logits: Tensor, drafts: Tensor, argmax_drafts: Tensor,
    noise: Noise, uniforms: Tensor, *, is_sampled: Tensor, logit_cap: float = 0.0,
    bounds: Tensor | None = None, requests: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    # fmt: on
    """Triton version of `reference.reject_by_block`; the advantage is 0 without noise."""
    batch, rows, width = drafts.shape[0], drafts.shape[1] + 1, logits.shape[-1]
    shared, device = bounds is not None, logits.device
    shape = logits.shape[:-1] if requests is None else requests.shape
    total = shape.numel()
    parts, part_width = split_rows(total, width, BLOCK)
    p_peaks, p_sums, q_peaks, q_sums, values, residual_masses, overlap_masses = torch.empty(
        7, aligned(total), parts, device=device
    )
    indices = torch.empty(total, parts, dtype=torch.int32, device=device)
    p_lses, q_lses, acceptance, argmax_ps = torch.empty(4, aligned(total), device=device)
    choices = torch.empty(shape, dtype=torch.int64, device=device)
    num_correct = torch.empty(batch, dtype=torch.int32, device=device)
    advantage = torch.empty(batch, rows - 1, device=device)
    # shared rows change in number from step to step: the tile has room for any number of parts
    most_parts = triton.cdiv(width, BLOCK) if shared else parts
    size = {"SHARED": shared, "ROWS": padded(rows), "PARTS": triton.next_power_of_2(most_parts)}
    scan = {"LOGIT_CAP": logit_cap, "SHARED": shared, "BLOCK": BLOCK, "num_warps": 4}
    strides = (0, *logits.stride()[:-1])[-2:] + draft_logits.stride()[:2]
    _sum_parts[(total, parts)](
        *(logits, noise.scales, requests, bounds, p_peaks, p_sums, *strides[:2], rows, width),
        *(part_width, shared),
        **scan,
    )
    _sum_parts[(total if shared else batch * (rows - 1), parts)](
        *(draft_logits, noise.scales, requests, bounds, q_peaks, q_sums, *strides[2:]),
        *(rows - 1, width, part_width, False),
        **scan,
    )
    _prefix_acceptance[(batch,)](
        *(logits, draft_logits, drafts, argmax_drafts, noise.scales, is_sampled, bounds),
        *(p_peaks, p_sums, q_peaks, q_sums, p_lses, q_lses, acceptance, argmax_ps),
        *(*strides, drafts.stride(0), argmax_drafts.stride(0), parts, rows),
        LOGIT_CAP=logit_cap,
        **size,
    )
    _draw_parts[(total, parts)](
        *(logits, draft_logits, noise.keys, noise.scales, is_sampled, requests, bounds),
        *(p_lses, q_lses, acceptance, residual_masses, overlap_masses, values, indices),
        *(*strides, noise.keys.stride(0), width, part_width, rows),
        **scan,
    )
    _accept_or_reject[(batch,)](
        *(drafts, uniforms, noise.scales, is_sampled, bounds, acceptance, argmax_ps),
        *(residual_masses, overlap_masses, values, indices, choices, num_correct, advantage),
        *(drafts.stride(0), uniforms.stride(0), parts, rows),
        **size,
    )
    return choices, num_correct, advantage
