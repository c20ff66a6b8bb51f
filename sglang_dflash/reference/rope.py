"""The oracle's rotary frequencies: plain, or stretched by YaRN as in gpt-oss's drafters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Rotary embedding with a base and, unless None, the settings of YaRN."""

    theta: float
    scaling: Mapping[str, Any] | None = None

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0 if self.scaling is None else 0.1 * math.log(self.scaling["factor"]) + 1.0

    def frequencies(self, half: int) -> Tensor:
        """Return the angle per position of each pair of dimensions, [half] fp32."""
        pairs = torch.arange(half, dtype=torch.float32)
        plain = self.theta ** (-pairs / half)
        if self.scaling is None:
            return plain
        # pairs that turn often in the trained context keep their frequency, those that turn less
        # than once are stretched, and those in between get some of both
        first = self._pair_that_turns(self.scaling.get("beta_fast", 32.0), half)
        last = self._pair_that_turns(self.scaling.get("beta_slow", 1.0), half)
        if self.scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
        return plain * (1 - stretched) + plain / self.scaling["factor"] * stretched

    def _pair_that_turns(self, times: float, half: int) -> float:
        """Return the pair, as a fraction, that turns so often in the trained context."""
        assert self.scaling is not None
        context = self.scaling["original_max_position_embeddings"]
        return half * math.log(context / (times * 2 * math.pi)) / math.log(self.theta)
