"""The configuration of a training run, as one frozen dataclass. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# settings that determine the data or the weights: a resumed run must use the same ones
FIXED = (
    "model_path",
    "init_from",
    "layers",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "sliding_window",
    "max_length",
    "thinking",
    "held_out",
    "tokens_per_batch",
    "anchors",
    "labels",
    "loss",
    "gamma",
    "optimizer",
    "seed",
)

# device-dependent defaults: on a GPU, and on a CPU, where they give the tiny target a first drafter
# in minutes
BY_DEVICE: dict[str, tuple[int | str, int | str]] = {
    "max_new_tokens": (512, 128),
    "max_length": (1024, 256),
    "tokens_per_batch": (32768, 512),
    "anchors": (96, 24),
    "optimizer": ("muon", "adamw"),
    "steps": (3000, 600),
    "held_out": (64, 16),
    "evaluate_prompts": (16, 8),
    "evaluate_tokens": (256, 64),
}

# lower bounds of sizes and counts
LEAST = {
    "layers": 1,
    "block_size": 2,
    "sliding_window": 0,
    "answers_per_prompt": 1,
    "max_new_tokens": 2,
    "max_length": 16,
    "anchors": 1,
    "chunk_rows": 1,
    "held_out": 1,
    "evaluate_prompts": 1,
    "evaluate_tokens": 2,
    "engine_rows": 1,
}

# times, rates and the number of steps
ABOVE_ZERO = (
    "steps",
    "minutes",
    "pause_after",
    "answer_minutes",
    "checkpoint_every",
    "learning_rate",
    "gamma",
)

# `acceptance.sample_at` shifts a seed by 32 bits, and torch's generator takes 63
MAX_SEED = 2**31 - 1

# --thinking -> enable_thinking of the chat template
THINKING = {"on": True, "off": False, "default": None}


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """How the command was called: enough to tell a user how to continue."""

    command_line: tuple[str, ...]
    out: Path
    resume: bool
    evaluate_only: bool

    @property
    def continues(self) -> bool:
        """Whether `out` is expected to hold a run."""
        return self.resume or self.evaluate_only


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """The architecture of a new drafter. None: derived from the target."""

    layers: int = 4
    block_size: int = 16
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    sliding_window: int = 0  # 0: every layer has full attention


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Invocation):
    """One run, with all defaults resolved. Fields are named after their flags."""

    model_path: str
    device: str  # "cuda" or "cpu"
    stop_after: str | None = None  # "answers" or "train"
    seed: int = 0
    licence: str = "not stated"

    prompts: tuple[Path, ...] = ()
    answers: tuple[Path, ...] = ()  # of other runs, instead of prompts
    engine: str = "auto"  # or "sglang", "transformers"
    attention_backend: str = "triton"
    engine_rows: int = 512
    answers_per_prompt: int = 1
    max_new_tokens: int
    max_length: int
    answer_minutes: float | None = None
    share: slice  # of the questions
    temperatures: dict[float, float]  # temperature -> share of the answers
    thinking: str = "default"  # a key of THINKING

    init_from: str | None = None
    shape: DrafterShape | None  # None: taken from init_from

    steps: int | None  # None: training is limited by minutes alone
    minutes: float | None = None
    pause_after: float | None = None  # minutes
    checkpoint_every: float = 5.0  # minutes
    tokens_per_batch: int
    anchors: int
    optimizer: str  # "muon" or "adamw"
    learning_rate: float = 1e-3
    labels: str = "soft"  # or "hard"
    loss: str = "dpace"  # or "decay"
    gamma: float | None = None  # None: the published value for the block size
    chunk_rows: int = 4096
    attention: str = "auto"  # or "sdpa", "flex"

    held_out: int
    evaluate_prompts: int
    evaluate_tokens: int

    @property
    def enable_thinking(self) -> bool | None:
        return THINKING[self.thinking]

    def settings(self) -> dict[str, Any]:
        """Return the FIXED settings in JSON types; without a shape, its settings are None."""
        shape = asdict(self.shape) if self.shape else {}
        found = {name: getattr(self, name, shape.get(name)) for name in FIXED}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def default_gamma(block_size: int) -> float:
    """Return the published decay for a block size: 7 for 16, 5 for 10, 4 for 8."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, block_size * 7 / 16))


def check_config(config: TrainConfig) -> None:
    """Raise ValueError for settings that cannot work, before anything is loaded."""
    if config.prompts and config.answers:
        raise ValueError(
            "Both --prompts and --answers were given. Answers bring their prompts: pass only one."
        )
    sizes = vars(config) | (vars(config.shape) if config.shape else {})
    for name, low in LEAST.items():
        if name in sizes and sizes[name] < low:
            raise ValueError(f"{flag(name)} is {sizes[name]}. Pass {low} or more.")
    if config.tokens_per_batch < config.max_length:
        raise ValueError(
            f"--tokens-per-batch {config.tokens_per_batch} cannot hold one sequence of "
            f"--max-length {config.max_length}. Raise the first or lower the second."
        )
    if not 0 <= config.seed <= MAX_SEED:
        raise ValueError(f"--seed is {config.seed}. Pass 0 to {MAX_SEED}.")
    for name in ABOVE_ZERO:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag(name)} is {value}. Pass a finite number above 0.")
    if config.gamma is not None and config.loss != "decay":
        raise ValueError(
            f"--gamma {config.gamma:g} was given, but --loss {config.loss} has no such setting. "
            "Add --loss decay, or drop --gamma."
        )
