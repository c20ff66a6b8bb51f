"""What `tune` varies: settings of a server, as arguments and in words, and the order of trials."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_dflash.config import DrafterSpec
from sglang_dflash.draft_backends import Place, able_backends

# of those that can run a drafter, the ones that come first in order of preference
MOST_DRAFT_BACKENDS = 2
# ours on Triton has its own verify kernel; None: what SGLang picks
TARGET_BACKENDS = ("triton", None)


@dataclass(frozen=True)
class Settings:
    """How a pair is served. On a CPU there is one attention backend, and no memory fraction."""

    block: int  # 1: plain decoding
    width: str = "auto"
    target_backend: str | None = None
    draft_backend: str | None = None
    fraction: float | None = None

    @property
    def is_plain(self) -> bool:
        return self.block == 1

    def __str__(self) -> str:
        if self.is_plain:
            return "plain decoding"
        width = "" if self.width == "auto" else f", width {self.width}"
        parts = [f"block size {self.block}{width}"]
        if self.draft_backend is not None:
            target = self.target_backend or "SGLang's choice"
            parts += [f"target on {target}", f"draft on {self.draft_backend}"]
        if self.fraction is not None:
            parts.append(f"memory fraction {self.fraction:g}")
        return ", ".join(parts)

    def environment(self) -> dict[str, str]:
        return {} if self.width == "auto" else {"SGLANG_DFLASH_WIDTH": self.width}

    def arguments(self, options: argparse.Namespace, *, on_gpu: bool) -> list[str]:
        """Return the server arguments, the user's own at the end."""
        found = ["--model-path", options.model_path]
        if not self.is_plain:
            # launch/cpu.sh turns DFLASH on itself
            found += ["--speculative-algorithm", "DFLASH"] if on_gpu else []
            found += ["--speculative-draft-model-path", options.speculative_draft_model_path]
            found += ["--speculative-num-draft-tokens", str(self.block)]
            if self.target_backend is not None:
                found += ["--attention-backend", self.target_backend]
            if self.draft_backend is not None:
                found += ["--speculative-draft-attention-backend", self.draft_backend]
        if self.fraction is not None:
            found += ["--mem-fraction-static", f"{self.fraction:g}"]
            found += ["--swa-full-tokens-ratio", f"{options.swa_full_tokens_ratio:g}"]
            found += ["--tp-size", str(options.tp_size)]
        found += ["--quantization", options.quantization] if options.quantization else []
        found += ["--kv-cache-dtype", options.kv_cache_dtype] if options.kv_cache_dtype else []
        found += ["--trust-remote-code"] if options.trust_remote_code else []
        return [*found, *options.server_args]

    def launch_line(self, options: argparse.Namespace, *, on_gpu: bool) -> str:
        """Return the command that serves so."""
        switches = [f"{name}={value}" for name, value in self.environment().items()]
        if self.is_plain and not on_gpu:
            switches.append("PLAIN=1")
        program = ["python", "-m", "sglang.launch_server"] if on_gpu else ["launch/cpu.sh"]
        words = [*program, *self.arguments(options, on_gpu=on_gpu)]
        return " ".join([*switches, shlex.join(words)])


@dataclass(frozen=True)
class Plan:
    """The settings to begin with, and what to vary, one thing after another."""

    first: Settings
    draft_backends: tuple[str, ...]
    target_backends: tuple[str | None, ...]
    blocks: tuple[int, ...]
    widths: tuple[str, ...]

    @classmethod
    def of(cls, drafter: DrafterSpec, place: Place, options: argparse.Namespace) -> Plan:
        blocks = options.blocks or default_blocks(drafter.block_size)
        too_large = [block for block in blocks if not 2 <= block <= drafter.block_size]
        if too_large:
            raise ValueError(
                f"--blocks {' '.join(map(str, too_large))}: the drafter's block size is "
                f"{drafter.block_size}. Pass 2 to {drafter.block_size}."
            )
        if place.device == "cpu":
            first = Settings(max(blocks))
            return cls(first, (), (), tuple(blocks), tuple(options.widths))
        able = able_backends(drafter.attention_kinds(), place)[:MOST_DRAFT_BACKENDS]
        first = Settings(
            max(blocks), "auto", TARGET_BACKENDS[0], able[0], options.mem_fraction_static
        )
        return cls(first, tuple(able), TARGET_BACKENDS, tuple(blocks), tuple(options.widths))

    def stages(self) -> list[list[dict[str, object]]]:
        """Return the changes of each stage, without those that `first` already has."""
        stages: list[list[dict[str, object]]] = [
            [{"draft_backend": name} for name in self.draft_backends],
            [{"target_backend": name} for name in self.target_backends],
            [{"block": block} for block in sorted(self.blocks, reverse=True)],
            [{"width": width} for width in self.widths],
        ]
        return [[c for c in stage if varied(self.first, c) != self.first] for stage in stages]

    def trials(self) -> int:
        return sum(map(len, self.stages()))

    def variants(self, best: Settings, stage: int) -> Iterator[Settings]:
        """Return the settings to try in a stage, which differ from the best so far in one thing."""
        for change in self.stages()[stage]:
            yield varied(best, change)


def varied(settings: Settings, change: dict[str, object]) -> Settings:
    """Return settings with one change; the width `full` is that of the block."""
    if change.get("width") == "full":
        change = {"width": str(settings.block)}
    return replace(settings, **change)  # type: ignore[arg-type]


def default_blocks(block_size: int) -> list[int]:
    """Return the drafter's block size, a half and a quarter of it."""
    return sorted({block_size, max(2, block_size // 2), max(2, block_size // 4)}, reverse=True)
