"""Counters of a replica, and what they gained between polls, across a restart of its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

STAGES = ("draft", "verify", "commit")


@dataclass(frozen=True)
class Counts:
    """Counters of a replica since it started, or of several."""

    steps: int = 0  # verify steps of requests
    committed: int = 0
    rows: int = 0
    histogram: Sequence[int] = ()  # [k]: steps that committed k + 1 tokens
    accepted_at: Sequence[int] = ()  # [k]: steps in which draft k + 1 was accepted
    timed_steps: int = 0  # steps of the batch
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage

    @classmethod
    def of(cls, ours: Mapping[str, Any]) -> Counts:
        """Read a replica's state. Raise KeyError, TypeError or ValueError for one that has other
        counters."""
        acceptance = ours["acceptance"]
        # a server of an earlier version reports no stages
        stages = ours.get("stages", {"steps": 0, "seconds": {}})
        at_width = [int(steps) for steps in acceptance["at_width"]]
        return cls(
            steps=int(acceptance["verify_steps"]),
            committed=int(acceptance["committed_tokens"]),
            rows=sum(width * steps for width, steps in enumerate(at_width, start=1)),
            histogram=[int(steps) for steps in acceptance["histogram"]],
            accepted_at=[int(steps) for steps in acceptance["accepted_at"]],
            timed_steps=int(stages["steps"]),
            seconds={stage: float(spent) for stage, spent in stages["seconds"].items()},
        )

    def since(self, earlier: Counts) -> Counts:
        """Return what was added since; all of it if the server has started anew, which a counter
        that fell shows."""
        added = self._with(earlier, lambda now, then: now - then)
        return self if any(value < 0 for value in added._values()) else added

    def plus(self, other: Counts) -> Counts:
        """Add the counters of another replica, whose block size may differ."""
        return self._with(other, lambda one, two: one + two)

    def _values(self) -> Iterator[float]:
        yield from (self.steps, self.committed, self.rows, self.timed_steps)
        yield from self.histogram
        yield from self.accepted_at
        yield from self.seconds.values()

    def _with(self, other: Counts, combine: Callable[[Any, Any], Any]) -> Counts:
        def lists(one: Sequence[int], two: Sequence[int]) -> list[int]:
            return [combine(*pair) for pair in zip_longest(one, two, fillvalue=0)]

        return Counts(
            steps=combine(self.steps, other.steps),
            committed=combine(self.committed, other.committed),
            rows=combine(self.rows, other.rows),
            histogram=lists(self.histogram, other.histogram),
            accepted_at=lists(self.accepted_at, other.accepted_at),
            timed_steps=combine(self.timed_steps, other.timed_steps),
            seconds={
                stage: combine(self.seconds.get(stage, 0.0), other.seconds.get(stage, 0.0))
                for stage in {*self.seconds, *other.seconds}
            },
        )

    def rates(self, seconds: float) -> dict[str, float | None]:
        """Return what these counts are by step and by second; None where nothing was counted."""
        found: dict[str, float | None] = {
            "tokens_per_s": round(self.committed / seconds, 2),
            "accept_length": ratio(self.committed, self.steps),
            "width": ratio(self.rows, self.steps),
        }
        for stage in STAGES:
            ms = 1000 * self.seconds.get(stage, 0.0)
            found[f"{stage}_ms"] = ratio(ms, self.timed_steps)
        return found


def gained(polls: Sequence[Counts]) -> Counts:
    """Return what was counted from the first of these to the last. From poll to poll, because only
    so a restart shows whose server has counted more since than before."""
    found = Counts()
    for earlier, later in pairwise(polls):
        found = found.plus(later.since(earlier))
    return found


def ratio(count: float, of: int) -> float | None:
    return round(count / of, 4) if of else None
