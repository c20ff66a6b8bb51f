"""Training steps: the schedule, the drafter's loss, and what can be resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sglang_dflash.reference.model import Drafter
from sglang_dflash.train.batches import Batch
from sglang_dflash.train.blocks import TargetPass, run_blocks, run_target
from sglang_dflash.train.loss import (
    Anchors,
    Labels,
    Weighting,
    decay_weights,
    make_labels,
    row_losses,
    sample_anchors,
    weighted_mean,
)
from sglang_dflash.train.optimizer import make_optimizers


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Ends after `steps` or after `seconds`, whichever comes first; the rate follows that one."""

    steps: int | None = None
    seconds: float | None = None
    learning_rate: float = 2e-3
    warmup: float = 0.04  # share of the whole
    floor: float = 0.05  # share of the learning rate that the cosine ends at
    weight_decay: float = 0.01
    clip: float = 1.0

    def share(self, step: int, seconds: float) -> float:
        """Return how much of the training lies behind, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def rate(self, share: float) -> float:
        """Return the learning rate: linear warm-up, then a cosine to the floor."""
        if share < self.warmup:
            return self.learning_rate * share / self.warmup
        done = (share - self.warmup) / (1 - self.warmup)
        low = self.floor * self.learning_rate
        return low + (self.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(kw_only=True)
class Training:
    """A module in training: weights, optimizer, and how far it has come."""

    module: nn.Module
    schedule: Schedule
    optimizer: str = "adamw"  # or "muon"
    step: int = 0
    seconds: float = 0.0  # spent in steps, over all processes that took part
    rate: float = 0.0  # of the last step
    losses: list[Tensor] = field(default_factory=list)  # since this process began

    def __post_init__(self) -> None:
        self.optimizers = make_optimizers(
            self.module,
            self.optimizer,
            learning_rate=self.schedule.learning_rate,
            weight_decay=self.schedule.weight_decay,
        )

    @property
    def share(self) -> float:
        return self.schedule.share(self.step, self.seconds)

    def recent_loss(self, steps: int = 20) -> float:
        """Return the mean loss of the last steps; waits for the device."""
        recent = self.losses[-steps:]
        return torch.stack(recent).mean().item() if recent else math.nan

    def run(
        self,
        batches: Iterator[Batch],
        *,
        loss_of: Callable[[Batch], Tensor],
        after_step: Callable[[Training], bool] = lambda training: False,
    ) -> None:
        """Train until the schedule ends, or until `after_step` returns True."""
        while self.share < 1:
            began = time.monotonic()
            # the rate at the end of this step, so that the first step has one
            self.rate = self.schedule.rate(self.schedule.share(self.step + 1, self.seconds))
            loss = loss_of(next(batches))
            self.module.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.module.parameters(), self.schedule.clip)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.rate
                optimizer.step()
            self.losses.append(loss.detach())
            if loss.is_cuda and self.schedule.seconds:
                # or the clock would count launches, and run ahead of the device
                torch.cuda.synchronize()
            self.step += 1
            self.seconds += time.monotonic() - began
            if after_step(self):
                return

    def state(self) -> dict[str, Any]:
        return {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.seconds = state["step"], state["seconds"]


def optimise(
    module: nn.Module,
    batches: Iterator[Batch],
    *,
    loss_of: Callable[[Batch], Tensor],
    schedule: Schedule,
    label: str,
    optimizer: str = "adamw",
    log_every: int = 50,
) -> list[float]:
    """Train `module` in place and return the loss of every step."""
    training = Training(module=module, schedule=schedule, optimizer=optimizer)

    def log(training: Training) -> bool:
        if training.step % log_every == 0:
            print(
                f"{label} step {training.step}/{schedule.steps} "
                f"loss {training.recent_loss(log_every):.4f} ({training.seconds:.0f} s)",
                flush=True,
            )
        return False

    training.run(batches, loss_of=loss_of, after_step=log)
    return torch.stack(training.losses).tolist()


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
            head=self.target.get_output_embeddings(),
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
        head = self.target.get_output_embeddings()
        hidden = self.hidden(batch, anchors, self.run_target(batch).features).flatten(0, 2)
        drafts = [head(part.to(head.weight.dtype)).argmax(-1) for part in hidden.split(self.chunk)]
        right = torch.cat(drafts).cpu().view_as(labels.token_ids) == labels.token_ids
        correct = (right & labels.exist).long().cumprod(-1).sum()
        blocks = int(anchors.exist.sum())
        return int(correct) + blocks, blocks
