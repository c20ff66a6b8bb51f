"""The ratio of two systems that took turns, round by round, and how sure it is.

How fast a shared host is drifts by the second: the two windows of one small model's rate differ by
up to a third. The rounds of a pair, one right after the other and with the same questions, share
most of that. The ratio is the median over the pairs, and its interval lies between two of them, by
their order: how likely it holds the true median depends on the number of pairs alone, not on how
their ratios are distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb
from statistics import median
from typing import Any, NamedTuple

# least probability that the interval holds the true median; five pairs are the fewest that have one
CONFIDENCE = 0.9


class Ratio(NamedTuple):
    value: float
    low: float | None = None  # of the interval; None: not measured in pairs, or in too few
    high: float | None = None

    def text(self) -> str:
        """Return e.g. "1.064 [1.02, 1.11]"."""
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.3f}{interval}"

    def is_below(self, least: float) -> bool:
        """Return whether it is surely below: it and its whole interval."""
        return (self.value if self.high is None else self.high) < least


def ratios_of(above: dict[str, Any], below: dict[str, Any]) -> list[float]:
    """Return the ratios of two points' rounds; none unless they were measured in turn."""
    if above.get("began") is None or above["began"] != below.get("began"):
        return []
    return [a / b for a, b in zip(above["rounds"], below["rounds"], strict=True)]


def ratio_of(above: dict[str, Any], below: dict[str, Any]) -> Ratio:
    """Return the ratio of two points: of their rounds, if they were measured in turn, else of their
    rates."""
    of_rounds = summed_up(ratios_of(above, below))
    return of_rounds or Ratio(above["tokens_per_s"] / below["tokens_per_s"])


def summed_up(ratios: Sequence[float]) -> Ratio | None:
    """Return the median and its interval; None if there are too few for one."""
    outside = outside_of(len(ratios))
    if outside is None:
        return None
    ordered = sorted(ratios)
    return Ratio(median(ordered), ordered[outside], ordered[-1 - outside])


def outside_of(count: int) -> int | None:
    """Return how many of so many ratios lie below the interval, and as many above it; None if even
    all of them make none."""
    found, outside = None, 0
    while 2 * _at_most(outside, count) <= 1 - CONFIDENCE:
        found = outside
        outside += 1
    return found


def _at_most(few: int, count: int) -> float:
    """Return the probability that at most so few of all ratios lie below the true median."""
    return sum(comb(count, n) for n in range(few + 1)) / 2**count


def pooled(points: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Ratio | None:
    """Return the ratio over all pairs of several points."""
    return summed_up([ratio for above, below in points for ratio in ratios_of(above, below)])
