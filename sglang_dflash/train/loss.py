"""The drafter's loss: cross entropy of the drafted slots, weighted by their place in the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from sglang_dflash.reference.model import Drafter
from sglang_dflash.train.anchors import Anchors, Labels, make_labels, sample_anchors
from sglang_dflash.train.batches import Batch
from sglang_dflash.train.blocks import TargetPass, linear_head, run_blocks, run_target

# (surprise [b, N, B - 1], exist [b, N, B - 1] bool) -> weights [b, N, B - 1]
Weighting = Callable[[Tensor, Tensor], Tensor]


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
    head: nn.Linear,
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
        head: nn.Linear,
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


def _logits(head: nn.Linear, hidden: Tensor, cap: float) -> Tensor:
    logits = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias).float()
    return torch.tanh(logits / cap) * cap if cap else logits


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean; 0 where nothing weighs anything."""
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)


@dataclass(frozen=True, kw_only=True)
class DrafterLoss:
    """The drafter's loss on a batch of the target's own answers. The target stays frozen."""

    target: PreTrainedModel
    drafter: Drafter
    generator: torch.Generator  # on the CPU, so that a seed means the same anchors everywhere
    blocks: int = 64  # per batch, shared evenly by its rows
    soft: bool = False  # learn what the target predicts, not only what it said
    weigh: Weighting = field(default_factory=lambda: decay_weights(7.0))
    chunk: int = 4096  # rows of logits at a time
    attention: str = "sdpa"

    def __call__(self, batch: Batch) -> Tensor:
        anchors, labels = self.draw(batch)
        # found on the CPU: to find them on the device would mean to wait for it
        rows = labels.exist.flatten().nonzero().flatten()
        sequences = torch.arange(len(batch.lens))[:, None, None] * batch.token_ids.shape[1]
        before = (sequences + labels.before).flatten()[rows]
        device = self.target.device
        seen = self.run_target(batch)
        hidden = self.hidden(batch, anchors, seen.features)
        rows, exist = rows.to(device), labels.exist.to(device)
        config = self.target.config.get_text_config()
        found = row_losses(
            hidden.flatten(0, 2).index_select(0, rows),
            labels.token_ids.to(device).flatten()[rows],
            taught=seen.hidden.flatten(0, 1)[before.to(device)] if self.soft else None,
            head=linear_head(self.target),
            logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
            chunk=self.chunk,
        )
        surprise = found.surprise.new_zeros(exist.numel()).index_copy(0, rows, found.surprise)
        weights = self.weigh(surprise.view(exist.shape), exist)
        return weighted_mean(found.losses, weights.flatten()[rows])

    def draw(self, batch: Batch) -> tuple[Anchors, Labels]:
        """Draw the anchors of a batch that is still on the CPU."""
        # a batch of few long rows has as many blocks as one of many short rows: every token counts
        each = max(1, self.blocks // len(batch.lens))
        anchors = sample_anchors(batch.answer_mask, each, generator=self.generator)
        size = self.drafter.config.block_size
        return anchors, make_labels(batch.token_ids, batch.answer_mask, anchors, block_size=size)

    def run_target(self, batch: Batch) -> TargetPass:
        ids = batch.token_ids.to(self.target.device)
        return run_target(self.target, ids, self.drafter.config.target_layer_ids)

    def hidden(self, batch: Batch, anchors: Anchors, features: Tensor) -> Tensor:
        """Return the drafter's hidden states of the drafted slots, [b, N, B - 1, H]."""
        device = self.target.device
        return run_blocks(
            self.target,
            self.drafter,
            batch.to(device),
            anchors.positions.to(device),
            features=features,
            attention=self.attention,
        )

    @torch.no_grad()
    def acceptance(self, batch: Batch) -> tuple[int, int]:
        """Return (tokens, blocks): what the drawn blocks would commit if verified by the text."""
        anchors, labels = self.draw(batch)
        head = linear_head(self.target)
        hidden = self.hidden(batch, anchors, self.run_target(batch).features).flatten(0, 2)
        drafts = [head(part.to(head.weight.dtype)).argmax(-1) for part in hidden.split(self.chunk)]
        right = torch.cat(drafts).cpu().view_as(labels.token_ids) == labels.token_ids
        correct = (right & labels.exist).long().cumprod(-1).sum()
        blocks = int(anchors.exist.sum())
        return int(correct) + blocks, blocks
