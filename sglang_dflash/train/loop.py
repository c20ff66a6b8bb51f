"""Training steps: the schedule, the target's loss, the drafter's loss, and the target's answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from sglang_dflash.reference.generate import capture_features
from sglang_dflash.reference.model import Drafter
from sglang_dflash.train.batches import Batch
from sglang_dflash.train.loss import make_labels, sample_anchors, weighted_cross_entropy


@dataclass(frozen=True, kw_only=True)
class Schedule:
    steps: int
    learning_rate: float = 2e-3
    warmup: float = 0.04  # share of the steps
    floor: float = 0.05  # share of the learning rate that the cosine ends at
    weight_decay: float = 0.01
    clip: float = 1.0
    log_every: int = 20

    def rate(self, step: int) -> float:
        """Return the learning rate of one step: linear warm-up, then a cosine to the floor."""
        warm = max(1, round(self.steps * self.warmup))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        low = self.floor * self.learning_rate
        return low + (self.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


def optimise(
    module: nn.Module,
    batches: Iterator[Batch],
    *,
    loss_of: Callable[[Batch], Tensor],
    schedule: Schedule,
    label: str,
) -> list[float]:
    """Train `module` in place and return the loss of every step."""
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=schedule.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=schedule.weight_decay,
        fused=True,
    )
    losses: list[float] = []
    began = time.monotonic()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = loss_of(next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), schedule.clip)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % schedule.log_every == 0:
            recent = losses[-schedule.log_every :]
            print(
                f"{label} step {step + 1}/{schedule.steps} loss {sum(recent) / len(recent):.4f} "
                f"({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return losses


def target_loss(target: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the next-token cross entropy over the answers."""
    hidden = target.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    said = batch.answer_mask[:, 1:]
    logits = target.get_output_embeddings()(hidden[:, :-1][said])
    return F.cross_entropy(logits.float(), batch.token_ids[:, 1:][said])


@dataclass(frozen=True, kw_only=True)
class DrafterLoss:
    """The drafter's loss on a batch of the target's own answers. The target stays frozen."""

    target: PreTrainedModel
    drafter: Drafter
    generator: torch.Generator
    blocks: int = 64  # per batch, shared evenly by its rows
    gamma: float = 7.0

    def __call__(self, batch: Batch) -> Tensor:
        config = self.drafter.config
        features = capture_features(self.target, batch.token_ids, config.target_layer_ids)
        steps = torch.arange(features.shape[1], device=features.device)
        context = self.drafter.context_kv(
            self.drafter.project(features), steps.expand_as(batch.token_ids)
        )
        # a batch of few long rows has as many blocks as one of many short rows: every token counts
        each = max(1, self.blocks // len(batch.lens))
        anchors = sample_anchors(batch.answer_mask, each, generator=self.generator)
        hidden = self.drafter.forward_anchors(
            self._embed(batch, anchors.positions),
            anchors.positions,
            context=context,
            context_lens=batch.lens,
        )
        labels = make_labels(
            batch.token_ids,
            batch.answer_mask,
            anchors,
            block_size=config.block_size,
            gamma=self.gamma,
        )
        learn = labels.weights > 0
        logits = self.target.get_output_embeddings()(hidden[:, :, 1:][learn])
        return weighted_cross_entropy(logits, labels.token_ids[learn], labels.weights[learn])

    def _embed(self, batch: Batch, positions: Tensor) -> Tensor:
        """Return [b, N, B, H]: each anchor's token, then masks, in the target's embedding."""
        config = self.drafter.config
        ids = positions.new_full((*positions.shape, config.block_size), config.mask_token_id)
        ids[:, :, 0] = batch.token_ids.gather(1, positions)
        with torch.no_grad():
            return self.target.get_input_embeddings()(ids)
