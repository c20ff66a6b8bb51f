"""Block verification: rejection sampling that accepts or rejects a block's drafts jointly.

One sequence at a time, written from the definition: Sun et al., Block Verification Accelerates
Speculative Decoding (2024), algorithm 2. p is the target's distribution, q the drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockRule:
    """Samples drafts from q at a temperature, and verifies them against p."""

    def __init__(self, temperature: float, *, seed: int) -> None:
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)
        self._q: list[Tensor] = []  # each [V], the distributions of the last drafts

    def choose(self, logits: Tensor, _before: Sequence[int]) -> int:
        """Sample one token from its logits [V]."""
        return self._draw(self._distribution(logits))

    def start_block(self) -> None:
        """Forget the drafts of the last block."""
        self._q = []

    def draft(self, logits: Tensor) -> list[int]:
        """Sample a block's drafts, one from every row of logits [B - 1, V]."""
        self.start_block()
        return [self.draft_next(row) for row in logits]

    def draft_next(self, logits: Tensor) -> int:
        """Sample the block's next draft from its logits [V], which may depend on those before."""
        self._q.append(self._distribution(logits))
        return self._draw(self._q[-1])

    def commit(self, logits: Tensor, drafts: Sequence[int]) -> list[int]:
        """Return the accepted drafts and the next token, from the target's logits [B, V]."""
        p = self._distribution(logits)
        accepted, next_weights, prefix = 0, self._residual(p[0], 0, 1.0), 1.0
        for number, token in enumerate(drafts, start=1):
            ratio = float(p[number - 1, token] / self._q[number - 1][token])
            # joint acceptance of the drafts so far
            prefix = min(prefix * ratio, 1.0)
            residual = self._residual(p[number], number, prefix)
            mass = float(residual.sum())
            chance = 1.0 if prefix == 1 else mass / (mass + 1 - prefix)
            if float(torch.rand((), generator=self._generator)) < chance:
                accepted, next_weights = number, residual
        # the residual is empty where p equals q; the next draft is then accepted too, unless
        # rounding intervenes
        weights = next_weights if next_weights.any() else p[accepted]
        return [*drafts[:accepted], self._draw(weights)]

    def _residual(self, p: Tensor, number: int, prefix: float) -> Tensor:
        """Return the unnormalised residual distribution [V] after `number` accepted drafts."""
        if number == len(self._q):
            return p * prefix
        return (p * prefix - self._q[number]).clamp(min=0)

    def _distribution(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.double().cpu() / self._temperature, dim=-1)

    def _draw(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self._generator))
