"""What `tune` varies: settings of a server, as arguments and in words, and the order of trials."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sglang_dflash.commands.card_names import FRACTION, SLIDING_SHARE
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
    width: str = "auto"  # or full: that of the block
    target_backend: str | None = None
    draft_backend: str | None = None
    fraction: float | None = None

    @property
    def is_plain(self) -> bool:
        return self.block == 1

    def __str__(self) -> str:
        if self.is_plain:
            return "plain decoding"
        width = "" if self.width == "auto" else f", width {self.block}"
        parts = [f"block size {self.block}{width}"]
        if self.draft_backend is not None:
            target = self.target_backend or "SGLang's choice"
            parts += [f"target on {target}", f"draft on {self.draft_backend}"]
        if self.fraction is not None:
            parts.append(f"memory fraction {self.fraction:g}")
        return ", ".join(parts)

    def environment(self) -> dict[str, str]:
        is_chosen = self.is_plain or self.width == "auto"
        return {} if is_chosen else {"SGLANG_DFLASH_WIDTH": str(self.block)}

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
        # on a CPU these have no default of ours, and are passed on if they were given
        fraction = options.mem_fraction_static if self.fraction is None else self.fraction
        found += [] if fraction is None else ["--mem-fraction-static", f"{fraction:g}"]
        share = options.swa_full_tokens_ratio
        share = SLIDING_SHARE if share is None and on_gpu else share
        found += [] if share is None else ["--swa-full-tokens-ratio", f"{share:g}"]
        found += ["--tp-size", str(options.tp_size)] if on_gpu or options.tp_size > 1 else []
        found += ["--quantization", options.quantization] if options.quantization else []
        how = options.speculative_draft_model_quantization
        found += ["--speculative-draft-model-quantization", how] if how else []
        found += ["--kv-cache-dtype", options.kv_cache_dtype] if options.kv_cache_dtype else []
        draft_dtype = options.speculative_draft_kv_cache_dtype
        found += ["--speculative-draft-kv-cache-dtype", draft_dtype] if draft_dtype else []
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
        blocks = tuple(dict.fromkeys(options.blocks or default_blocks(drafter.block_size)))
        widths = tuple(dict.fromkeys(options.widths))
        too_large = [block for block in blocks if not 2 <= block <= drafter.block_size]
        if too_large:
            raise ValueError(
                f"--blocks {' '.join(map(str, too_large))}: the drafter's block size is "
                f"{drafter.block_size}. Pass 2 to {drafter.block_size}."
            )
        width = "auto" if "auto" in widths else widths[0]
        if place.device == "cpu":
            return cls(Settings(max(blocks), width), (), (), blocks, widths)
        able = able_backends(drafter.attention_kinds(), place)[:MOST_DRAFT_BACKENDS]
        fraction = options.mem_fraction_static
        fraction = FRACTION if fraction is None else fraction
        first = Settings(max(blocks), width, TARGET_BACKENDS[0], able[0], fraction)
        return cls(first, tuple(able), TARGET_BACKENDS, blocks, widths)

    def stages(self) -> list[list[dict[str, Any]]]:
        """Return the changes of each stage, without those that `first` already has."""
        stages: list[list[dict[str, Any]]] = [
            [{"draft_backend": name} for name in self.draft_backends],
            [{"target_backend": name} for name in self.target_backends],
            [{"block": block} for block in sorted(self.blocks, reverse=True)],
            [{"width": width} for width in self.widths],
        ]
        return [[c for c in stage if replace(self.first, **c) != self.first] for stage in stages]

    def trials(self) -> int:
        return sum(map(len, self.stages()))

    def variants(self, best: Settings, stage: int) -> Iterator[Settings]:
        """Return the settings to try in a stage, which differ from the best so far in one thing."""
        for change in self.stages()[stage]:
            yield replace(best, **change)


def default_blocks(block_size: int) -> list[int]:
    """Return the drafter's block size, a half and a quarter of it."""
    return sorted({block_size, max(2, block_size // 2), max(2, block_size // 4)}, reverse=True)
