"""The training stage: from answers to an exported drafter, with checkpoints and a progress bar."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from sglang_dflash.reference.model import Drafter, DrafterConfig
from sglang_dflash.train.answers import Answer
from sglang_dflash.train.batches import Batch, Batches, Example, collate
from sglang_dflash.train.blocks import choose_attention
from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.loss import DrafterLoss, Weighting, decay_weights, dpace_weights
from sglang_dflash.train.stop import Stop
from sglang_dflash.train.trainer import Schedule, Trainer

# evaluations on held-out answers over the whole run
HELD_OUT_EVALUATIONS = 25
# sequences are padded to this multiple on a GPU: fewer and aligned shapes
GPU_MULTIPLE = 64


def train_drafter(
    target: PreTrainedModel,
    drafter_config: DrafterConfig,
    *,
    begin_with: Path | None,
    answers: dict[str, Answer],
    config: TrainConfig,
    pad_id: int,
    stop: Stop,
) -> bool:
    """Train a drafter into `config.out`; return False if it was paused or stopped."""
    if begin_with:
        drafter = Drafter.from_pretrained(begin_with).requires_grad_(True)
    else:
        torch.manual_seed(config.seed)
        # initialised on the CPU, so that a seed gives the same weights on any device
        drafter = Drafter(drafter_config)
    trainer, loss_of = _start(target, drafter.to(target.device), config)
    examples = [answer.example(config.max_length) for answer in answers.values()]
    held_out, examples = examples[: config.held_out], examples[config.held_out :]
    multiple = GPU_MULTIPLE if target.device.type == "cuda" else 1
    batches = Batches(
        # an answer of one token has no label
        [e for e in examples if sum(e.answer_mask) > 1],
        tokens_per_batch=config.tokens_per_batch,
        pad_id=pad_id,
        seed=config.seed,
        multiple=multiple,
    )
    monitor = _Monitor(
        out=config.out,
        batches=batches,
        loss_of=loss_of,
        held_out=_in_batches(held_out, config.tokens_per_batch, pad_id, multiple),
        checkpoint_every=config.checkpoint_every * 60,
        pause_after=config.pause_after * 60 if config.pause_after else None,
        seed=config.seed,
        stop=stop,
    )
    monitor.resume(trainer)
    parameters = sum(p.numel() for p in trainer.module.parameters())
    print(
        f"train: {len(batches.examples)} sequences in {len(batches.groups)} batches per epoch, "
        f"{parameters / 1e6:.1f} M parameters, {loss_of.blocks} blocks per batch, attention "
        f"{loss_of.attention}",
        flush=True,
    )
    with stop.let_finish("saving after this step; a second signal exits immediately"):
        with monitor:
            trainer.run(batches, loss_of=loss_of, after_step=monitor)
        monitor.save(trainer)
    return trainer.share >= 1 and not stop.asked


def _start(
    target: PreTrainedModel, drafter: Drafter, config: TrainConfig
) -> tuple[Trainer, DrafterLoss]:
    schedule = Schedule(
        steps=config.steps,
        seconds=config.minutes * 60 if config.minutes else None,
        learning_rate=config.learning_rate,
    )
    blocks = max(1, config.anchors * config.tokens_per_batch // config.max_length)
    attention = config.attention
    if attention == "auto":
        attention = choose_attention(
            target.device,
            tokens_per_batch=config.tokens_per_batch,
            blocks=blocks,
            block_size=drafter.config.block_size,
            max_length=config.max_length,
        )
    loss_of = DrafterLoss(
        target=target,
        drafter=drafter,
        generator=torch.Generator().manual_seed(config.seed),
        blocks=blocks,
        soft=config.labels == "soft",
        weigh=_slot_weights(config),
        chunk=config.chunk_rows,
        attention=attention,
    )
    trainer = Trainer(module=drafter, schedule=schedule, optimizer=config.optimizer)
    return trainer, loss_of


def _slot_weights(config: TrainConfig) -> Weighting:
    if config.loss == "dpace":
        return dpace_weights()
    assert config.gamma is not None, config
    return decay_weights(config.gamma)


def _in_batches(
    examples: Sequence[Example], tokens: int, pad_id: int, multiple: int
) -> list[Batch]:
    longest = max(len(e.token_ids) for e in examples)
    rows = max(1, tokens // (longest + multiple))
    return [
        collate(examples[first : first + rows], pad_id=pad_id, multiple=multiple)
        for first in range(0, len(examples), rows)
    ]


@dataclass(kw_only=True)
class _Monitor:
    """After each step: progress bar, held-out evaluation, checkpoints, pause."""

    out: Path
    batches: Batches
    loss_of: DrafterLoss
    held_out: list[Batch]
    checkpoint_every: float
    pause_after: float | None
    seed: int
    stop: Stop

    def __post_init__(self) -> None:
        self.began = self.saved = time.monotonic()
        self.estimate: float | None = None
        self.evaluated = -1
        self.sequences = 0

    def __enter__(self) -> None:
        # in percent, because the schedule may be limited by time
        self.bar = tqdm(
            total=100.0,
            initial=0.0,
            desc="train",
            mininterval=0.5 if sys.stderr.isatty() else 15,
            bar_format="{desc} {percentage:5.1f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )

    def __exit__(self, *_error: object) -> None:
        self.bar.close()

    def __call__(self, trainer: Trainer) -> bool:
        self.sequences += len(self.batches.groups[self.batches.index - 1])
        number = int(trainer.share * HELD_OUT_EVALUATIONS)
        if number > self.evaluated:
            self.evaluated = number
            self.evaluate(trainer)
        now = time.monotonic()
        if now - self.saved > self.checkpoint_every:
            self.save(trainer)
        grown = 100 * trainer.share - self.bar.n
        if self.bar.update(grown):
            self._describe(trainer)
        paused = self.pause_after is not None and now - self.began > self.pause_after
        return paused or self.stop.asked is not None

    def _describe(self, trainer: Trainer) -> None:
        rate = self.sequences / (time.monotonic() - self.began)
        text = f"step {trainer.step}, loss {trainer.recent_loss():.3f}, {rate:.1f} sequences/s"
        if self.estimate is not None:
            text += f", accept {self.estimate:.2f}"
        self.bar.set_postfix_str(text)

    def evaluate(self, trainer: Trainer) -> None:
        """Estimate the accept length on held-out answers, at fixed anchors, and log it."""
        fixed = replace(self.loss_of, generator=torch.Generator().manual_seed(self.seed))
        counts = [fixed.acceptance(batch) for batch in self.held_out]
        self.estimate = sum(tokens for tokens, _ in counts) / max(1, sum(n for _, n in counts))
        row = {
            "step": trainer.step,
            "seconds": round(trainer.seconds, 2),
            "epoch": self.batches.epoch,
            "loss": trainer.recent_loss(),
            "learning_rate": trainer.rate,
            "estimate": self.estimate,
        }
        with (self.out / "progress.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint and export the drafter; raise instead if the loss is not finite."""
        if trainer.losses and not torch.isfinite(trainer.losses[-1]):
            raise RuntimeError(
                f"The loss is {trainer.losses[-1].item()} at step {trainer.step}. Lower "
                "--learning-rate and pass --resume: the last checkpoint was kept."
            )
        state: dict[str, Any] = trainer.state() | {
            "generator": self.loss_of.generator.get_state(),
            "epoch": self.batches.epoch,
            "index": self.batches.index,
            "looked": self.evaluated,
        }
        # atomic: an interrupted write must not destroy the last checkpoint
        partial = self.out / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.out / "checkpoint.pt")
        self.loss_of.drafter.save_pretrained(self.out / "drafter")
        scores = {
            "step": trainer.step,
            "seconds": trainer.seconds,
            "share": trainer.share,
            "estimate": self.estimate,
        }
        (self.out / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
        self.saved = time.monotonic()

    def resume(self, trainer: Trainer) -> None:
        """Load the checkpoint in the out folder, if there is one."""
        path = self.out / "checkpoint.pt"
        if not path.exists():
            (self.out / "progress.jsonl").unlink(missing_ok=True)
            return
        state = torch.load(path, map_location=self.loss_of.target.device, weights_only=True)
        trainer.load(state)
        self.loss_of.generator.set_state(state["generator"].cpu())
        self.batches.seek(state["epoch"], state["index"])
        self.evaluated = state["looked"]
        self._truncate_progress(trainer.step)
        print(f"train: resumed at step {trainer.step}, {trainer.seconds:.0f} s", flush=True)

    def _truncate_progress(self, step: int) -> None:
        # steps after the checkpoint will be repeated
        path = self.out / "progress.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= step]
        path.write_text("".join(kept))
        self.estimate = rows[len(kept) - 1]["estimate"] if kept else None
