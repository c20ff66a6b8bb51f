"""Sampling with drafts that are drawn from the drafter, and kept or dropped by the block.

One sequence at a time and by the definition: Sun et al., Block Verification Accelerates
Speculative Decoding (2024), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockRule:
    """Draws drafts at a temperature, and decides what the target commits of them."""

    def __init__(self, temperature: float, *, seed: int) -> None:
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)
        self._drafted = torch.empty(0)  # [B - 1, V] the distributions of the last drafts

    def choose(self, logits: Tensor, _before: Sequence[int]) -> int:
        """Draw one token from its logits [V]."""
        return self._draw(self._distribution(logits))

    def draft(self, logits: Tensor) -> list[int]:
        """Draw a token from every row of logits [B - 1, V]."""
        self._drafted = self._distribution(logits)
        return [self._draw(row) for row in self._drafted]

    def commit(self, logits: Tensor, drafts: Sequence[int]) -> list[int]:
        """Return the drafts to keep, and the token after them, from the target's logits [B, V]."""
        own = self._distribution(logits)
        kept, left_behind, reached = 0, self._left(own[0], 0, 1.0), 1.0
        for number, token in enumerate(drafts, start=1):
            odds = float(own[number - 1, token] / self._drafted[number - 1, token])
            reached = min(reached * odds, 1.0)
            left = self._left(own[number], number, reached)
            mass = float(left.sum())
            chance = 1.0 if reached == 1 else mass / (mass + 1 - reached)
            if float(torch.rand((), generator=self._generator)) < chance:
                kept, left_behind = number, left
        # nothing is left where both distributions are the same: there the next draft is kept too,
        # but for rounding
        return [*drafts[:kept], self._draw(left_behind if left_behind.any() else own[kept])]

    def _left(self, own: Tensor, number: int, reached: float) -> Tensor:
        """Return what is left of the target's distribution [V] behind so many drafts."""
        if number == len(self._drafted):
            return own * reached
        return (own * reached - self._drafted[number]).clamp(min=0)

    def _distribution(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.double().cpu() / self._temperature, dim=-1)

    def _draw(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self._generator))
