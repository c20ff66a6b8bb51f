"""Every environment variable that the package reads, with its type.

Each is validated on access, so that a process rejects only what it uses. The only other reader of
the environment is glue/cpu/path/, which Python runs before it can import this package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# ours
SWITCH = "SGLANG_DFLASH"
WIDTH = "SGLANG_DFLASH_WIDTH"
DRAW_ACCEPTANCE = "SGLANG_DFLASH_DRAW_ACCEPTANCE"
ALARM = "SGLANG_DFLASH_ALARM"
ALARM_WINDOW = "SGLANG_DFLASH_ALARM_WINDOW"
RANK_PATIENCE = "SGLANG_DFLASH_RANK_PATIENCE"
COMPARE_RANKS = "SGLANG_DFLASH_COMPARE_RANKS"
DEFAULT_PATIENCE = 30  # seconds
PAIRS = "SGLANG_DFLASH_PAIRS"
DEFAULT_ALARM = 1.5  # tokens per step; below it a block costs more than it gains
DEFAULT_WINDOW = 1000  # verify steps, counted per request

# SGLang's own, with the same meaning
CPU_MODE = "SGLANG_USE_CPU_ENGINE"
SPEC_V2 = "SGLANG_ENABLE_SPEC_V2"
DFLASH_SPEC_V2 = "SGLANG_ENABLE_DFLASH_SPEC_V2"
PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
SIMULATE = "SGLANG_SIMULATE_ACC_LEN"
LONGER_CONTEXTS = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
# attention backend -> variable and default of the prefill alignment in deterministic mode
DETERMINISTIC_PREFILL_ALIGN = {
    "triton": ("SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE", 4096),
    "flashinfer": ("SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE", 4096),
}

SWITCH_VALUES = {
    **{"0": False, "false": False, "1": True, "true": True},
    **{"no": False, "n": False, "yes": True, "y": True},
}


@dataclass(frozen=True)
class Environment:
    """Typed access to the environment, or to a mapping; ValueError names an invalid variable."""

    values: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def check(self) -> None:
        """Read every variable, so that an invalid one is found before anything is loaded."""
        for name, found in vars(type(self)).items():
            if isinstance(found, property):
                getattr(self, name)

    @property
    def plugin_is_on(self) -> bool:
        """Whether this plug-in serves DFLASH; if not, SGLang's own implementation does."""
        value = self.values.get(SWITCH)
        if value not in (None, "on", "off"):
            raise ValueError(f"{SWITCH}={value} is neither on nor off. Set one of the two.")
        return value != "off"

    @property
    def is_cpu_mode(self) -> bool:
        """Whether SGLang runs in CPU mode."""
        return self.values.get(CPU_MODE) == "1"

    @property
    def spec_v2(self) -> bool:
        """Whether speculative decoding may use overlap scheduling."""
        return self._switch(SPEC_V2, default=True)

    @property
    def dflash_spec_v2(self) -> bool:
        """The same, for DFLASH only."""
        return self._switch(DFLASH_SPEC_V2, default=True)

    @property
    def plan_stream(self) -> bool:
        """Whether verify is planned on a side stream while the drafter runs."""
        return self._switch(PLAN_STREAM, default=False)

    @property
    def allows_longer_contexts(self) -> bool:
        """Whether SGLang serves contexts that a model was not made for."""
        return self._switch(LONGER_CONTEXTS, default=False)

    @property
    def simulated_accept_length(self) -> float | None:
        """Mean tokens a step pretends to commit, for benchmarks; None for real acceptance."""
        value = self.values.get(SIMULATE)
        if value is None:
            return None
        try:
            length = float(value)
        except ValueError:
            raise ValueError(
                f"{SIMULATE}={value} is not a number. Set a length of 1 or more."
            ) from None
        return length if length > 0 else None

    @property
    def draws_acceptance(self) -> bool:
        """Whether acceptance is simulated as each request's id says, for benchmarks."""
        return self._switch(DRAW_ACCEPTANCE, default=False)

    @property
    def shares_rows(self) -> bool:
        """Whether the requests of a step may verify different numbers of rows."""
        return self.values.get(WIDTH, "auto") == "auto"

    def width(self, block_size: int) -> int | None:
        """Verify width of every step, the anchor included; None to choose it step by step."""
        value = self.values.get(WIDTH, "auto")
        if value in ("auto", "uniform"):
            return None
        if not value.isdecimal() or not 1 <= int(value) <= block_size:
            raise ValueError(
                f"{WIDTH}={value} is neither auto, uniform nor a number of tokens from 1 (no "
                f"drafts) to the block size {block_size}. Set one of these, or unset it."
            )
        return int(value)

    @property
    def alarm_threshold(self) -> float:
        """Accept length below which a warning is logged; 0 for never."""
        return self._number(ALARM, DEFAULT_ALARM, least=0.0)

    @property
    def alarm_window(self) -> int:
        """Number of verify steps, counted per request, over which acceptance is judged."""
        return int(self._number(ALARM_WINDOW, DEFAULT_WINDOW, least=1.0))

    @property
    def rank_patience(self) -> float:
        """Seconds after which a rank that does not answer ends the server; 0 for never."""
        return self._number(RANK_PATIENCE, DEFAULT_PATIENCE, least=0.0)

    @property
    def compares_ranks(self) -> bool:
        """Whether the ranks compare every step, for debugging; it makes steps slower."""
        return self._switch(COMPARE_RANKS, default=False)

    @property
    def pairs_folder(self) -> Path | None:
        """Folder with the project's own pairs; None to look for them in the usual places."""
        value = self.values.get(PAIRS)
        return Path(value).expanduser() if value else None

    def prefill_align(self, backend: str) -> int:
        """Alignment in tokens of SGLang's prefill chunks in deterministic mode on this backend."""
        name, default = DETERMINISTIC_PREFILL_ALIGN[backend]
        value = self.values.get(name, str(default))
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{name}={value} is not an integer. Set one, or unset it.") from None

    def _switch(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if value.strip().lower() not in SWITCH_VALUES:
            raise ValueError(
                f"{name}={value} is neither on nor off. Set one of {', '.join(SWITCH_VALUES)}, "
                "or leave it unset."
            )
        return SWITCH_VALUES[value.strip().lower()]

    def _number(self, name: str, default: float, *, least: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            number = least - 1
        # NaN, too
        if not number >= least:
            raise ValueError(
                f"{name}={value} is not a number of at least {least:g}. Set one, or unset it."
            )
        return number
