"""The training stage: from answers to an exported drafter, with checkpoints and a progress bar."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from sglang_dflash.reference.model import Drafter, DrafterConfig
from sglang_dflash.train.batches import Batch, Batches, Example, collate
from sglang_dflash.train.blocks import choose_attention
from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.held_out import Split
from sglang_dflash.train.loss import DrafterLoss, Weighting, decay_weights, dpace_weights
from sglang_dflash.train.records import read_progress
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
    answers: Split,
    config: TrainConfig,
    pad_id: int,
    stop: Stop,
) -> bool:
    """Train a drafter into `config.out`; return False if it was paused or stopped."""
    multiple = GPU_MULTIPLE if target.device.type == "cuda" else 1
    batches = Batches(
        _training_examples(answers, config),
        tokens_per_batch=config.tokens_per_batch,
        pad_id=pad_id,
        seed=config.seed,
        multiple=multiple,
    )
    held_out = [answer.example(config.max_length) for answer in answers.held_out]
    drafter = _make_drafter(drafter_config, begin_with=begin_with, seed=config.seed)
    trainer, loss_of = _start(target, drafter.to(target.device), config)
    monitor = _Monitor(
        config=config,
        batches=batches,
        loss_of=loss_of,
        held_out=_in_batches(held_out, config.tokens_per_batch, pad_id, multiple),
        stop=stop,
    )
    monitor.resume(trainer)
    monitor.announce(trainer)
    with stop.let_finish("saving after this step; a second signal exits immediately"):
        with monitor:
            trainer.run(batches, loss_of=loss_of, after_step=monitor)
        monitor.save(trainer)
    return trainer.share >= 1 and not stop.asked


def _training_examples(answers: Split, config: TrainConfig) -> list[Example]:
    """Return the examples with a label: an answer of one token has none."""
    examples = [answer.example(config.max_length) for answer in answers.training]
    found = [example for example in examples if sum(example.answer_mask) > 1]
    if not found:
        raise ValueError(
            f"none of the {len(examples)} answers to train on has two tokens within --max-length "
            f"{config.max_length}, so there is nothing to draft. Pass longer answers, or raise "
            "--max-length."
        )
    return found


def _make_drafter(config: DrafterConfig, *, begin_with: Path | None, seed: int) -> Drafter:
    """Return the drafter to train, on the CPU, so that a seed gives the same weights anywhere."""
    if begin_with:
        return Drafter.from_pretrained(begin_with).requires_grad_(True)
    torch.manual_seed(seed)
    return Drafter(config)


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


def _are_finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(weights).all()) for weights in module.parameters())


@contextmanager
def _restoring(path: Path) -> Iterator[None]:
    """Raise ValueError with advice if the block cannot restore a run from its checkpoint."""
    try:
        yield
    # neither is the file's fault
    except (PermissionError, torch.OutOfMemoryError):
        raise
    # a damaged file makes torch and pickle raise what they like
    except Exception as error:
        found = f"it lacks {error}" if isinstance(error, KeyError) else _first_sentence(error)
        raise ValueError(
            f"{path} is not a whole checkpoint of this run ({found}). Delete it and pass --resume "
            "to begin training again, or pass another --out folder."
        ) from error


def _first_sentence(error: Exception) -> str:
    # what follows in torch's messages is on torch itself
    text = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
    return textwrap.shorten(text, 200, placeholder=" ...")


@dataclass(kw_only=True)
class _Monitor:
    """After each step: progress bar, held-out evaluation, checkpoints, pause."""

    config: TrainConfig
    batches: Batches
    loss_of: DrafterLoss
    held_out: list[Batch]
    stop: Stop

    def __post_init__(self) -> None:
        self.began = self.saved = time.monotonic()
        self.estimate: float | None = None
        self.evaluated = -1
        self.sequences = 0

    @property
    def checkpoint(self) -> Path:
        return self.config.out / "checkpoint.pt"

    @property
    def progress(self) -> Path:
        return self.config.out / "progress.jsonl"

    def announce(self, trainer: Trainer) -> None:
        """Print the size of what is about to be trained."""
        parameters = sum(p.numel() for p in trainer.module.parameters())
        print(
            f"train: {len(self.batches.examples)} sequences in {len(self.batches.groups)} batches "
            f"per epoch, {parameters / 1e6:.1f} M parameters, {self.loss_of.blocks} blocks per "
            f"batch, attention {self.loss_of.attention}",
            flush=True,
        )

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
        if now - self.saved > self.config.checkpoint_every * 60:
            self.save(trainer)
        grown = 100 * trainer.share - self.bar.n
        if self.bar.update(grown):
            self._describe(trainer)
        return self._pauses(now) or self.stop.asked is not None

    def _pauses(self, now: float) -> bool:
        minutes = self.config.pause_after
        return minutes is not None and now - self.began > minutes * 60

    def _describe(self, trainer: Trainer) -> None:
        rate = self.sequences / (time.monotonic() - self.began)
        text = f"step {trainer.step}, loss {trainer.recent_loss():.3f}, {rate:.1f} sequences/s"
        if self.estimate is not None:
            text += f", accept {self.estimate:.2f}"
        self.bar.set_postfix_str(text)

    def evaluate(self, trainer: Trainer) -> None:
        """Estimate the accept length on held-out answers, at fixed anchors, and log it."""
        fixed = replace(self.loss_of, generator=torch.Generator().manual_seed(self.config.seed))
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
        with self.progress.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint and export the drafter; raise instead if the loss or the weights are
        not finite."""
        self._check_finite(trainer)
        state: dict[str, Any] = trainer.state() | {
            "generator": self.loss_of.generator.get_state(),
            "epoch": self.batches.epoch,
            "index": self.batches.index,
            "looked": self.evaluated,
        }
        # atomic: an interrupted write must not destroy the last checkpoint
        partial = self.config.out / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        self.loss_of.drafter.save_pretrained(self.config.out / "drafter")
        scores = {
            "step": trainer.step,
            "seconds": trainer.seconds,
            "share": trainer.share,
            "estimate": self.estimate,
        }
        (self.config.out / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
        self.saved = time.monotonic()

    def _check_finite(self, trainer: Trainer) -> None:
        if not trainer.losses:
            return
        loss = trainer.losses[-1]
        if not torch.isfinite(loss):
            found = f"the loss is {loss.item()} at step {trainer.step}"
        elif not _are_finite(trainer.module):
            # the loss is that of the weights before the step
            found = f"the drafter has weights that are not finite after step {trainer.step}"
        else:
            return
        kept = "there is no checkpoint yet, so training begins again"
        if self.checkpoint.exists():
            kept = "the last checkpoint was kept"
        raise ValueError(
            f"{found}. Lower --learning-rate {self.config.learning_rate:g} and pass --resume: "
            f"{kept}."
        )

    def resume(self, trainer: Trainer) -> None:
        """Load the checkpoint in the out folder, if there is one."""
        if not self.checkpoint.exists():
            self.progress.unlink(missing_ok=True)
            return
        with _restoring(self.checkpoint):
            state = torch.load(
                self.checkpoint, map_location=self.loss_of.target.device, weights_only=True
            )
            trainer.load(state)
            self.loss_of.generator.set_state(state["generator"].cpu())
            self.batches.seek(state["epoch"], state["index"])
            self.evaluated = state["looked"]
        self._truncate_progress(trainer.step)
        print(f"train: resumed at step {trainer.step}, {trainer.seconds:.0f} s", flush=True)

    def _truncate_progress(self, step: int) -> None:
        # steps after the checkpoint will be repeated
        if not self.progress.exists():
            raise ValueError(
                f"{self.progress} is missing, but {self.checkpoint} continues at step {step}. "
                "Restore it, or create an empty file to continue without the progress so far."
            )
        rows = read_progress(self.progress)
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= step]
        self.progress.write_text("".join(kept))
        self.estimate = rows[len(kept) - 1]["estimate"] if kept else None
