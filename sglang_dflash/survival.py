"""How drafts fared lately: their survival by position, and the tokens that a width commits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# acceptance is remembered for this many steps of a batch, or of one request if it is alone
MEMORY_STEPS, MEMORY_REQUEST_STEPS = 32, 64
# a position starts with the rate of the one before it, as if seen this often; the first with 0.9
PRIOR_ATTEMPTS, FIRST_RATE = 2.0, 0.9
LARGEST_WEIGHT = 1e6


class Acceptance:
    """Survival of drafts by position, from recent steps, whatever their width."""

    def __init__(self, block_size: int) -> None:
        # by position, of the drafts whose predecessors were all correct
        self._attempts = [0.0] * (block_size - 1)
        self._successes = [0.0] * (block_size - 1)
        # of the newest counts: growing it is cheaper than decaying all others
        self._weight = 1.0
        self._tokens: list[float] = []

    def record(self, width: int, num_correct: Sequence[int]) -> None:
        """Count one step of a batch: each request's number of correct drafts, 0 to width - 1."""
        if width < 2 or not num_correct:
            return
        requests = len(num_correct)
        self._grow(1 / (1 - 1 / max(MEMORY_STEPS, MEMORY_REQUEST_STEPS / requests)))
        # bytes count fastest; list first, because an array would hand over its memory instead
        stopped = map(bytes(list(num_correct)).count, range(width - 1))
        remaining = requests * self._weight
        for position, count in enumerate(stopped):
            self._attempts[position] += remaining
            remaining -= count * self._weight
            self._successes[position] += remaining

    def expect(self, survival: NDArray[np.floating]) -> None:
        """Count one step of a batch by the [b, D] expected survival of its drafts: where drafts
        were cut for their low confidence, the outcomes of the others would flatter."""
        requests = len(survival)
        self._grow(1 / (1 - 1 / max(MEMORY_STEPS, MEMORY_REQUEST_STEPS / requests)))
        remaining = requests * self._weight
        for position, alive in enumerate(survival.sum(axis=0).tolist()):
            self._attempts[position] += remaining
            remaining = alive * self._weight
            self._successes[position] += remaining

    def forget(self, attempts: float) -> None:
        """Keep the rates, but only as much evidence as this many attempts at the first draft."""
        if self._attempts and self._attempts[0] > attempts * self._weight:
            self._grow(self._attempts[0] / attempts / self._weight)

    def keep(self, share: float) -> None:
        """Keep the rates, but only this share of the evidence."""
        self._grow(1 / share)

    def survival(self) -> Floats:
        """Return [B - 1]: the probability that a draft and all before it are correct."""
        return np.diff(self.tokens())

    def tokens(self) -> list[float]:
        """Return [B]: the tokens that a request is expected to commit at widths 1 to B."""
        if not self._tokens:
            rate, alive, total = FIRST_RATE, 1.0, 1.0
            prior = PRIOR_ATTEMPTS * self._weight
            self._tokens = tokens = [total]
            for attempts, successes in zip(self._attempts, self._successes, strict=True):
                rate = (successes + prior * rate) / (attempts + prior)
                alive *= rate
                total += alive
                tokens.append(total)
        return self._tokens

    def _grow(self, factor: float) -> None:
        self._weight *= factor
        self._tokens = []
        if self._weight > LARGEST_WEIGHT:
            self._attempts = [count / self._weight for count in self._attempts]
            self._successes = [count / self._weight for count in self._successes]
            self._weight = 1.0


class SharedSteps:
    """What became of the steps that shared rows out."""

    def __init__(self) -> None:
        self._steps = self._rows = 0
        # decayed: steps, and sums of the mean rows, expected tokens and tokens of a request
        self._sums = (0.0, 0.0, 0.0, 0.0)

    def record(
        self, rows: NDArray[np.integer], survival: NDArray[np.floating], num_correct: ArrayLike
    ) -> None:
        requests, drafts = survival.shape
        self._steps += 1
        self._rows = int(rows.sum())
        verified = np.arange(1, drafts + 1) < rows[:, None]
        expected = float(np.vdot(survival, verified.astype(np.float32)))
        correct = int(np.minimum(num_correct, rows - 1).sum())
        new = (1, self._rows / requests, 1 + expected / requests, 1 + correct / requests)
        decay = 1 - 1 / MEMORY_STEPS
        steps, width, mean, real = (
            decay * old + value for old, value in zip(self._sums, new, strict=True)
        )
        self._sums = steps, width, mean, real

    def snapshot(self) -> dict[str, object]:
        steps, *sums = self._sums
        names = ("mean_width", "expected_tokens", "tokens")
        means = {
            name: round(total / steps, 4) if steps else None
            for name, total in zip(names, sums, strict=True)
        }
        return {"steps": self._steps, "rows": self._rows, **means}
