"""Blocks to train on: random anchors in answers, and the label of each drafted slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    positions: Tensor  # [b, N] int64
    exist: Tensor  # [b, N] bool; a short answer has fewer than N anchors


def sample_anchors(
    answer_mask: Tensor,  # [b, S] bool
    count: int,
    *,
    generator: torch.Generator,
) -> Anchors:
    """Draw up to `count` distinct anchors per row.

    An anchor is an answer token followed by another one, so its block has at least one label.
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
    before: Tensor  # [b, N, B - 1] int64; position whose target logits predict the label
    exist: Tensor  # [b, N, B - 1] bool; False past the end of the answer


def make_labels(
    token_ids: Tensor,  # [b, S] int64
    answer_mask: Tensor,  # [b, S] bool
    anchors: Anchors,
    *,
    block_size: int,
) -> Labels:
    """Return the label of every drafted slot. A block ends where its answer ends."""
    size = token_ids.shape[1]
    steps = torch.arange(1, block_size, device=token_ids.device)
    slots = anchors.positions[:, :, None] + steps
    inside = slots < size
    flat = slots.clamp(max=size - 1).flatten(1)
    ids = token_ids.gather(1, flat).view_as(slots)
    in_answer = answer_mask.gather(1, flat).view_as(slots) & inside & anchors.exist[:, :, None]
    # cumprod: no label after the first gap, even if another answer begins inside the block
    return Labels(ids, (slots - 1).clamp(max=size - 1), in_answer.long().cumprod(-1).bool())
