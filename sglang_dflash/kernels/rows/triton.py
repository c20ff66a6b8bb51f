"""Sharing of rows: one program shares them among the requests, one per request packs its own.

Fusion. Survival is a non-negative float, whose bits are ordered like integers: the lowest survival
that gets a row is found bit by bit, with one count over the whole batch for each bit, and nothing
is sorted. A request's share is its number of drafts above it, and what is left for those equal to
it, in order.

Layout contract: confidence [b, D] fp32 with unit column stride; everything else contiguous. No
tensor is read on the host. The number of rows and the width are runtime values: they may change
from step to step.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.extents import padded
from sglang_dflash.kernels.rows.reference import MARGIN

_MARGIN = tl.constexpr(MARGIN)


# fmt: off
@triton.jit(do_not_specialize=["stride", "num_requests", "drafts", "num_rows"])
def _share_rows(
    confidence, offsets, slopes, bounds, stride, num_requests, drafts, num_rows,
    REQUESTS: tl.constexpr, DRAFTS: tl.constexpr,
):
    # fmt: on
    request, column = tl.arange(0, REQUESTS), tl.arange(0, DRAFTS)
    alive = tl.full([REQUESTS], 1.0, tl.float32)
    survival = tl.full([REQUESTS, DRAFTS], -1.0, tl.float32)
    # one column after the other: a parallel scan rounds so that survival can increase
    for draft in range(drafts):
        c = tl.load(confidence + request * stride + draft, mask=request < num_requests, other=0.0)
        c = tl.minimum(tl.maximum(tl.where(c == c, c, _MARGIN), _MARGIN), 1 - _MARGIN)
        logit = tl.log(c) - tl.log(1.0 - c)
        alive *= tl.sigmoid(tl.load(offsets + draft) + tl.load(slopes + draft) * logit)
        survival = tl.where(column[None, :] == draft, alive[:, None], survival)
    survival = tl.where(request[:, None] < num_requests, survival, -1.0)
    # negative where there is no draft
    bits = survival.to(tl.int32, bitcast=True)

    wanted = num_rows - num_requests
    lowest = tl.full([], 0, tl.int32)
    for step in range(31):
        trial = lowest + (tl.full([], 1, tl.int32) << (30 - step))
        reached = tl.sum(tl.sum((bits >= trial).to(tl.int32), 1), 0)
        lowest = tl.where(reached >= wanted, trial, lowest)
    above = tl.sum((bits > lowest).to(tl.int32), 1)
    tied = tl.sum((bits == lowest).to(tl.int32), 1)
    left = wanted - tl.sum(above, 0) - (tl.cumsum(tied, 0) - tied)
    rows = 1 + above + tl.minimum(tl.maximum(left, 0), tied)
    last = tl.cumsum(rows, 0).to(tl.int64)
    tl.store(bounds + request, last - rows, mask=request < num_requests)
    tl.store(bounds + request + 1, last, mask=request == num_requests - 1)


def share_rows(confidence: Tensor, offsets: Tensor, slopes: Tensor, num_rows: int) -> Tensor:
    """Triton version of `reference.share_rows`."""
    requests, drafts = confidence.shape
    bounds = torch.empty(requests + 1, dtype=torch.int64, device=confidence.device)
    _share_rows[(1,)](
        *(confidence, offsets, slopes, bounds, confidence.stride(0), requests, drafts, num_rows),
        REQUESTS=padded(requests),
        DRAFTS=padded(drafts),
        num_warps=8,
    )
    return bounds


# fmt: off
@triton.jit(do_not_specialize=["width"])
def _pack_rows(
    bounds, token_ids, positions, slots, out_token_ids, out_positions, out_slots, requests, width,
    BLOCK: tl.constexpr,
):
    # fmt: on
    request = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    first = tl.load(bounds + request)
    live = column < tl.load(bounds + request + 1) - first
    at, out = request * width + column, first + column
    tl.store(out_token_ids + out, tl.load(token_ids + at, mask=live, other=0), mask=live)
    tl.store(out_positions + out, tl.load(positions + at, mask=live, other=0), mask=live)
    tl.store(out_slots + out, tl.load(slots + at, mask=live, other=0), mask=live)
    tl.store(requests + out, tl.zeros([BLOCK], tl.int64) + request, mask=live)


def pack_rows(
    bounds: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    out_token_ids: Tensor,
    out_positions: Tensor,
    out_slots: Tensor,
    requests: Tensor,
) -> None:
    """Triton version of `reference.pack_rows`."""
    batch, width = token_ids.shape
    _pack_rows[(batch,)](
        *(bounds, token_ids, positions, slots),
        *(out_token_ids, out_positions, out_slots, requests, width),
        BLOCK=padded(width),
        num_warps=1,
    )
