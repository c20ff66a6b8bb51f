"""What a drafter is trained on: random anchors in answers, early slots weighing most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Anchors:
    positions: Tensor  # [b, N] int64
    exist: Tensor  # [b, N] bool; a short answer has fewer than N


def sample_anchors(
    answer_mask: Tensor,  # [b, S] bool
    count: int,
    *,
    generator: torch.Generator,
) -> Anchors:
    """Draw up to `count` distinct anchors per row.

    An anchor is an answer token whose next token is one too: it then has a first draft to learn.
    """
    usable = answer_mask.clone()
    usable[:, :-1] &= answer_mask[:, 1:]
    usable[:, -1] = False
    # drawn on the generator's own device, so that a seed means the same anchors everywhere
    scores = torch.rand(usable.shape, generator=generator, device=generator.device)
    scores = scores.to(usable.device).masked_fill(~usable, -1.0)
    top = scores.topk(min(count, usable.sum(1).max().item()), dim=1)
    return Anchors(top.indices, top.values >= 0)


def slot_weights(block_size: int, *, gamma: float) -> Tensor:
    """Return the weights of slots 1..B-1, [B - 1]: exp(-(k - 1) / gamma)."""
    return torch.exp(-torch.arange(block_size - 1) / gamma)


@dataclass(frozen=True)
class Labels:
    token_ids: Tensor  # [b, N, B - 1] int64
    weights: Tensor  # [b, N, B - 1] float, 0 where there is nothing to learn


def make_labels(
    token_ids: Tensor,  # [b, S] int64
    answer_mask: Tensor,  # [b, S] bool
    anchors: Anchors,
    *,
    block_size: int,
    gamma: float,
) -> Labels:
    """Return what each slot should predict. A block ends where its answer ends."""
    size = token_ids.shape[1]
    steps = torch.arange(1, block_size, device=token_ids.device)
    slots = anchors.positions[:, :, None] + steps
    inside = slots < size
    flat = slots.clamp(max=size - 1).flatten(1)
    ids = token_ids.gather(1, flat).view_as(slots)
    said = answer_mask.gather(1, flat).view_as(slots) & inside & anchors.exist[:, :, None]
    # the first gap closes the block, even if another answer begins within its reach
    said = said.long().cumprod(-1)
    return Labels(ids, said * slot_weights(block_size, gamma=gamma).to(said.device))


def weighted_cross_entropy(
    logits: Tensor,  # [n, V] float
    labels: Tensor,  # [n] int64
    weights: Tensor,  # [n] float
) -> Tensor:
    """Return the weighted mean of the cross entropy."""
    each = F.cross_entropy(logits.float(), labels, reduction="none")
    return (each * weights).sum() / weights.sum()
