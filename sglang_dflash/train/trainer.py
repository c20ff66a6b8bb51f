"""The training loop: learning rate schedule, optimizer steps, state to resume from."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sglang_dflash.train.batches import Batch
from sglang_dflash.train.optimizer import make_optimizers

BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up and cosine decay over `steps` or `seconds`, whichever ends first."""

    steps: int | None = None
    seconds: float | None = None
    learning_rate: float = 2e-3
    warmup: float = 0.04  # fraction of the schedule
    floor: float = 0.05  # final learning rate, as a fraction of the peak
    weight_decay: float = 0.01
    clip: float = 1.0

    def share(self, step: int, seconds: float) -> float:
        """Return the completed fraction of the schedule, 0 to 1."""
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
class Trainer:
    """A module in training, with its optimizers and its progress."""

    module: nn.Module
    schedule: Schedule
    optimizer: str = "adamw"  # or "muon"
    step: int = 0
    seconds: float = 0.0  # spent in steps, over all resumed processes
    rate: float = 0.0  # of the last step
    losses: list[Tensor] = field(default_factory=list)  # of this process

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
        """Return the mean loss of the last steps. Synchronises with the device."""
        recent = self.losses[-steps:]
        return torch.stack(recent).mean().item() if recent else math.nan

    def run(
        self,
        batches: Iterator[Batch],
        *,
        loss_of: Callable[[Batch], Tensor],
        after_step: Callable[[Trainer], bool] = lambda trainer: False,
    ) -> None:
        """Train until the schedule ends, or until `after_step` returns True."""
        while self.share < 1:
            began = time.monotonic()
            # the rate at the end of the step: at its start, the first warm-up step would have 0
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
                # time the step, not its kernel launches
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
    trainer = Trainer(module=module, schedule=schedule, optimizer=optimizer)
    # in percent, because the schedule may be limited by time
    bar = tqdm(total=100.0, desc=label, disable=None, leave=False, bar_format=BAR)

    def log(trainer: Trainer) -> bool:
        bar.update(100 * trainer.share - bar.n)
        if trainer.step % log_every == 0:
            tqdm.write(
                f"{label} step {trainer.step}/{schedule.steps} "
                f"loss {trainer.recent_loss(log_every):.4f} ({trainer.seconds:.0f} s)"
            )
            sys.stdout.flush()
        return False

    with bar:
        trainer.run(batches, loss_of=loss_of, after_step=log)
    return torch.stack(trainer.losses).tolist()
