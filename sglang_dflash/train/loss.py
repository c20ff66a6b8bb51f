"""What a drafter is trained on: random anchors in answers, what each slot should predict, and how
much it weighs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# (surprise [b, N, B - 1], exist [b, N, B - 1] bool) -> weights [b, N, B - 1]
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
    before: Tensor  # [b, N, B - 1] int64; where the token before each stands
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
    return Labels(ids, (slots - 1).clamp(max=size - 1), said.long().cumprod(-1).bool())


def decay_weights(gamma: float) -> Weighting:
    """Weigh slot k = 1..B-1 with exp(-(k - 1) / gamma): early slots decide acceptance."""

    def weigh(_surprise: Tensor, exist: Tensor) -> Tensor:
        slots = torch.arange(exist.shape[-1], device=exist.device)
        return torch.exp(-slots / gamma) * exist

    return weigh


def dpace_weights(smooth: float = 0.5) -> Weighting:
    """Weigh a slot with the expected number of accepted slots from it to the block's end (D-PACE).

    A slot survives with (1 - smooth) * q + smooth, q being the drafter's own probability of the
    label; the products of these up to each slot, summed from the end, are the weights.
    """

    def weigh(surprise: Tensor, exist: Tensor) -> Tensor:
        survive = ((1 - smooth) * torch.exp(-surprise) + smooth).where(exist, 1.0)
        reach = survive.cumprod(-1) * exist
        return reach.flip(-1).cumsum(-1).flip(-1) * exist

    return weigh


class RowLosses(NamedTuple):
    losses: Tensor  # [n]
    surprise: Tensor  # [n]; -log of the drafter's probability of the label, without gradient


def row_losses(
    hidden: Tensor,  # [n, H]
    labels: Tensor,  # [n] int64
    *,
    taught: Tensor | None = None,  # [n, H]; the target's own hidden states at these rows
    head: nn.Module,
    logit_cap: float = 0.0,
    chunk: int,
) -> RowLosses:
    """Return each row's cross entropy with its label or, where the target's hidden states are
    given, with what the target predicts there. No more than `chunk` rows of logits exist at once.
    """
    return RowLosses(*_RowLosses.apply(hidden, labels, taught, head, logit_cap, chunk))


class _RowLosses(torch.autograd.Function):
    """The head is frozen, so a row's gradient is made beside its loss, but for the row's weight:
    its logits need neither be kept nor computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        taught: Tensor | None,
        head: nn.Module,
        cap: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        found = []
        for first in range(0, len(labels), chunk):
            rows = slice(first, first + chunk)
            wanted = labels[rows, None]
            logits = _logits(head, hidden[rows], cap)
            log_odds = logits.log_softmax(-1)
            surprise = -log_odds.gather(1, wanted)[:, 0]
            by_logit = log_odds.exp()
            if taught is None:
                losses = surprise
                by_logit.scatter_add_(1, wanted, by_logit.new_full(wanted.shape, -1.0))
            else:
                odds = _logits(head, taught[rows], cap).softmax(-1)
                losses = -torch.linalg.vecdot(odds, log_odds)
                by_logit -= odds
            if cap:
                by_logit *= 1 - (logits / cap) ** 2
            found.append((losses, surprise, by_logit.to(head.weight.dtype) @ head.weight))
        losses, surprise, gradients = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(surprise)
        return losses, surprise

    @staticmethod
    def backward(ctx: Any, weights: Tensor, _surprise: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return gradients * weights[:, None], None, None, None, None, None


def _logits(head: nn.Module, hidden: Tensor, cap: float) -> Tensor:
    logits = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias).float()
    return torch.tanh(logits / cap) * cap if cap else logits


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean; 0 where nothing weighs anything."""
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)
