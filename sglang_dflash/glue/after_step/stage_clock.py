"""Device time of each stage of a step, and how long the device waited for the host.

The device waits where it has passed the last boundary between stages before the host launches what
comes next: a CUDA graph, or the next step. What else is launched between two stages is short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

STAGES = ("draft", "verify", "commit")


class StepTime(NamedTuple):
    """Seconds of a step."""

    whole: float  # from its first boundary to its last one
    waiting: float  # the share of it that the device waited before graphs
    idle_after: float  # until the next step, if the device waited for that


@dataclass
class _Step:
    """A step's boundaries, and the waits in it, as (begin, end)."""

    marks: list[Any] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    was_waited_for: bool = True  # whether the device had passed the step before


class StageClock:
    """Time each stage without synchronising: events are read once the GPU has passed them."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._open: list[_Step] = []
        self._current = _Step()
        # the last boundary, unless a graph was launched since
        self._boundary: Any = None
        # where the last step whose times are known ended, its seconds, and those it waited
        self._last: tuple[Any, float, float] | None = None
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.steps = 0
        self._listener: Callable[[StepTime], None] = lambda step: None

    def tell(self, listener: Callable[[StepTime], None]) -> None:
        """Tell the listener the times of every step, in order, once the next one has begun."""
        self._listener = listener

    def snapshot(self) -> dict[str, Any]:
        """Return the seconds of each stage so far, and the steps they were spent in."""
        return {"steps": self.steps, "seconds": dict(self.seconds)}

    def mark(self) -> None:
        """Mark a stage boundary: four marks make a step."""
        step = self._current
        if not step.marks and self._open:
            step.was_waited_for = self._has_passed(self._open[-1].marks[-1])
        self._boundary = self._now()
        step.marks.append(self._boundary)
        if len(step.marks) == len(STAGES) + 1:
            self._open.append(step)
            self._current = _Step()
            self._boundary = None
            self._settle()

    def launches_graph(self) -> None:
        """Note that a CUDA graph is about to be launched: if the device has passed the boundary
        before it, it has waited since. Only the first graph of a stage is asked about."""
        boundary, self._boundary = self._boundary, None
        if boundary is not None and self._has_passed(boundary):
            self._current.waits.append((boundary, self._now()))

    def _settle(self) -> None:
        while self._open and self._has_passed(self._open[0].marks[-1]):
            step = self._open.pop(0)
            if self._last is not None:
                ended, seconds, waiting = self._last
                idle = self._between(ended, step.marks[0]) if step.was_waited_for else 0.0
                self._listener(StepTime(seconds, waiting, idle))
            whole = 0.0
            for stage, begin, end in zip(STAGES, step.marks[:-1], step.marks[1:], strict=True):
                seconds = self._between(begin, end)
                self.seconds[stage] += seconds
                whole += seconds
            self.steps += 1
            self._last = step.marks[-1], whole, sum(self._between(*wait) for wait in step.waits)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def _has_passed(self, moment: Any) -> bool:
        return not self._cuda or moment.query()

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin
