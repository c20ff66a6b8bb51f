"""Sharing of rows in torch: the specification, and the CPU path.

A step verifies N rows in all. Each request verifies its first columns, at least the anchor, in
packed rows: request r has rows bounds[r] up to bounds[r + 1].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.kernels.packing import places

# confidence is clamped to [MARGIN, 1 - MARGIN], so that its logit is finite
MARGIN = 1e-6


def share_rows(
    confidence: Tensor,  # [b, D] fp32, of each draft
    offsets: Tensor,  # [at least D] fp32
    slopes: Tensor,  # [at least D] fp32
    num_rows: int,  # from b to b * (D + 1)
) -> Tensor:
    """Return the bounds of each request's rows, [b + 1] int64.

    Draft k is correct, if those before it are, with probability sigmoid(offsets[k] + slopes[k] *
    logit(confidence)), and survives with the product of these up to its own. Each request gets a
    row for its anchor; the others go to the drafts that are likeliest to survive. On ties the lower
    request, then the lower column goes first, so a request always gets its first drafts.
    """
    requests, drafts = confidence.shape
    confidence = torch.where(confidence.isnan(), MARGIN, confidence)
    logits = torch.logit(confidence.clamp(MARGIN, 1 - MARGIN))
    survival = torch.sigmoid(offsets[:drafts] + slopes[:drafts] * logits).cumprod(dim=1)
    order = survival.flatten().sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(order)
    chosen[order[: num_rows - requests]] = 1
    return F.pad((1 + chosen.view(requests, drafts).sum(dim=1)).cumsum(dim=0), (1, 0))


def pack_rows(
    bounds: Tensor,  # [b + 1] int64
    token_ids: Tensor,  # [b, B] int64
    positions: Tensor,  # [b, B] int64
    slots: Tensor,  # [b, B] int64
    *,
    out_token_ids: Tensor,  # [N] int64, written
    out_positions: Tensor,  # [N] int64, written
    out_slots: Tensor,  # [N] int64, written
    requests: Tensor,  # [N] int64, written
) -> None:
    """Copy each request's first columns to its rows, and write the request of each row."""
    owners, columns = places(bounds, requests.shape[0])
    requests.copy_(owners)
    out_token_ids.copy_(token_ids[owners, columns])
    out_positions.copy_(positions[owners, columns])
    out_slots.copy_(slots[owners, columns])
