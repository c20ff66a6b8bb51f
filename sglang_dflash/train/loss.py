"""The drafter's loss: cross entropy of drafted slots, weighted by position in the block."""

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

# (nll of the labels [b, N, B - 1], exist [b, N, B - 1] bool) -> weights [b, N, B - 1]
Weighting = Callable[[Tensor, Tensor], Tensor]


def decay_weights(gamma: float) -> Weighting:
    """Weight slot k = 1..B-1 by exp(-(k - 1) / gamma): early slots decide acceptance."""

    def weigh(_nll: Tensor, exist: Tensor) -> Tensor:
        slots = torch.arange(exist.shape[-1], device=exist.device)
        return torch.exp(-slots / gamma) * exist

    return weigh


def dpace_weights(smooth: float = 0.5) -> Weighting:
    """Weight a slot by the expected number of accepted slots from it to the block's end (D-PACE).

    A slot is accepted with probability (1 - smooth) * q + smooth, where q is the drafter's own
    probability of the label. The weights are the suffix sums of the cumulative products.
    """

    def weigh(nll: Tensor, exist: Tensor) -> Tensor:
        accept = ((1 - smooth) * torch.exp(-nll) + smooth).where(exist, 1.0)
        prefix = accept.cumprod(-1) * exist
        return prefix.flip(-1).cumsum(-1).flip(-1) * exist

    return weigh


class RowLosses(NamedTuple):
    losses: Tensor  # [n]
    nll: Tensor  # [n]; negative log likelihood of the label under the drafter, without gradient


def row_losses(
    hidden: Tensor,  # [n, H]
    labels: Tensor,  # [n] int64
    *,
    teacher: Tensor | None = None,  # [n, H]; the target's hidden states that predict these labels
    head: nn.Linear,
    logit_cap: float = 0.0,
    chunk: int,
) -> RowLosses:
    """Return each row's cross entropy with its hard label or, given the target's hidden states,
    with the target's distribution as soft label. At most `chunk` rows of logits are held at once.
    """
    return RowLosses(*_RowLosses.apply(hidden, labels, teacher, head, logit_cap, chunk))


class _RowLosses(torch.autograd.Function):
    """Fused linear cross entropy over a frozen head: the gradient w.r.t. the hidden state, up to
    the row's weight, is computed with the loss, so logits are neither stored nor recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        head: nn.Linear,
        cap: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        found = []
        for first in range(0, len(labels), chunk):
            rows = slice(first, first + chunk)
            targets = labels[rows, None]
            logits = _logits(head, hidden[rows], cap)
            log_probs = logits.log_softmax(-1)
            nll = -log_probs.gather(1, targets)[:, 0]
            grad_logits = log_probs.exp()
            if teacher is None:
                losses = nll
                grad_logits.scatter_add_(1, targets, grad_logits.new_full(targets.shape, -1.0))
            else:
                soft = _logits(head, teacher[rows], cap).softmax(-1)
                losses = -torch.linalg.vecdot(soft, log_probs)
                grad_logits -= soft
            if cap:
                grad_logits *= 1 - (logits / cap) ** 2
            found.append((losses, nll, grad_logits.to(head.weight.dtype) @ head.weight))
        losses, nll, gradients = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(nll)
        return losses, nll

    @staticmethod
    def backward(ctx: Any, weights: Tensor, _nll: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return gradients * weights[:, None], None, None, None, None, None


def _logits(head: nn.Linear, hidden: Tensor, cap: float) -> Tensor:
    logits = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias).float()
    return torch.tanh(logits / cap) * cap if cap else logits


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean; 0 if all weights are 0."""
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)


@dataclass(frozen=True, kw_only=True)
class DrafterLoss:
    """The drafter's loss on a batch of the target's own answers, with a frozen target."""

    target: PreTrainedModel
    drafter: Drafter
    generator: torch.Generator  # on the CPU, so that a seed gives the same anchors on any device
    blocks: int = 64  # per batch, shared evenly by its rows
    soft: bool = False  # soft labels: the target's distribution instead of its token
    weigh: Weighting = field(default_factory=lambda: decay_weights(7.0))
    chunk: int = 4096  # rows of logits at a time
    attention: str = "sdpa"

    def __call__(self, batch: Batch) -> Tensor:
        anchors, labels = self.draw(batch)
        # on the CPU: nonzero on the device would synchronise
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
            teacher=seen.hidden.flatten(0, 1)[before.to(device)] if self.soft else None,
            head=linear_head(self.target),
            logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
            chunk=self.chunk,
        )
        nll = found.nll.new_zeros(exist.numel()).index_copy(0, rows, found.nll)
        weights = self.weigh(nll.view(exist.shape), exist)
        return weighted_mean(found.losses, weights.flatten()[rows])

    def draw(self, batch: Batch) -> tuple[Anchors, Labels]:
        """Sample the anchors of a batch that is still on the CPU, and their labels."""
        # blocks per batch, not per row, so that long and short sequences weigh the same per token
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
        """Return (tokens committed, blocks) with the drafts verified against the text itself
        (teacher forcing): an estimate of the accept length."""
        anchors, labels = self.draw(batch)
        head = linear_head(self.target)
        hidden = self.hidden(batch, anchors, self.run_target(batch).features).flatten(0, 2)
        drafts = [head(part.to(head.weight.dtype)).argmax(-1) for part in hidden.split(self.chunk)]
        right = torch.cat(drafts).cpu().view_as(labels.token_ids) == labels.token_ids
        correct = (right & labels.exist).long().cumprod(-1).sum()
        blocks = int(anchors.exist.sum())
        return int(correct) + blocks, blocks
