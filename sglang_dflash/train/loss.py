"""What a drafter is trained on: random anchors in answers, and how much each slot weighs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# (losses [b, N, B - 1] without gradient, exist [b, N, B - 1] bool) -> weights [b, N, B - 1]
Weighting = Callable[[Tensor, Tensor], Tensor]


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
    scores = torch.rand(usable.shape, generator=generator).masked_fill(~usable, -1.0)
    top = scores.topk(max(1, min(count, int(usable.sum(1).max()))), dim=1)
    return Anchors(top.indices, top.values >= 0)


@dataclass(frozen=True)
class Labels:
    token_ids: Tensor  # [b, N, B - 1] int64
    exist: Tensor  # [b, N, B - 1] bool; where there is something to learn


def make_labels(
    token_ids: Tensor,  # [b, S] int64
    answer_mask: Tensor,  # [b, S] bool
    anchors: Anchors,
    *,
    block_size: int,
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
    return Labels(ids, said.long().cumprod(-1).bool())


def decay_weights(gamma: float) -> Weighting:
    """Weigh slot k = 1..B-1 with exp(-(k - 1) / gamma): early slots decide acceptance."""

    def weigh(_losses: Tensor, exist: Tensor) -> Tensor:
        slots = torch.arange(exist.shape[-1], device=exist.device)
        return torch.exp(-slots / gamma) * exist

    return weigh


def dpace_weights(smooth: float = 0.5) -> Weighting:
    """Weigh a slot with the expected number of accepted slots from it to the block's end (D-PACE).

    A slot survives with (1 - smooth) * q + smooth, q being the drafter's own probability of the
    label; the products of these up to each slot, summed from the end, are the weights.
    """

    def weigh(losses: Tensor, exist: Tensor) -> Tensor:
        survive = ((1 - smooth) * torch.exp(-losses) + smooth).where(exist, 1.0)
        reach = survive.cumprod(-1) * exist
        return reach.flip(-1).cumsum(-1).flip(-1) * exist

    return weigh


def chunked_cross_entropy(
    hidden: Tensor,  # [n, H]
    labels: Tensor,  # [n] int64
    *,
    head: nn.Module,
    chunk: int,
) -> Tensor:
    """Return the cross entropy of each row, [n]; no more than `chunk` rows of logits exist at once.

    The logits are computed again for the gradient.
    """

    def rows(part: Tensor, wanted: Tensor) -> Tensor:
        logits = head(part.to(head.weight.dtype)).float()
        return F.cross_entropy(logits, wanted, reduction="none")

    parts = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    return torch.cat(
        [checkpoint(rows, *p, use_reentrant=False, preserve_rng_state=False) for p in parts]
    )


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean; 0 where nothing weighs anything."""
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)
