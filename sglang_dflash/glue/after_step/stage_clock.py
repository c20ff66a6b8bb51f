"""Device time of each stage of a step, and of its wait for the next step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

STAGES = ("draft", "verify", "commit")


class StageClock:
    """Time each stage without synchronising: events are read once the GPU has passed them."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._open: list[_Step] = []
        self._marks: list[Any] = []  # of the current step
        self._follows = False  # whether it follows the one before at once
        self._is_interrupted = False
        # the last step whose times are known, and its seconds
        self._last: tuple[_Step, float] | None = None
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.steps = 0
        self._listener: Callable[[float, float | None], None] = lambda seconds, idle: None

    def tell(self, listener: Callable[[float, float | None], None]) -> None:
        """Tell the listener the seconds of every step, in order, and for how long the device then
        waited for the next one, or None if that did not follow at once."""
        self._listener = listener

    def interrupt(self) -> None:
        """Note that the device does something else before the next step."""
        self._is_interrupted = True

    def snapshot(self) -> dict[str, Any]:
        """Return the seconds of each stage so far, and the steps they were spent in."""
        return {"steps": self.steps, "seconds": dict(self.seconds)}

    def mark(self) -> None:
        """Mark a stage boundary: four marks make a step."""
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        if not self._marks:
            self._follows = not self._is_interrupted
            self._is_interrupted = False
        self._marks.append(moment)
        if len(self._marks) == len(STAGES) + 1:
            self._open.append(_Step(self._marks, self._follows))
            self._marks = []
            self._settle()

    def _settle(self) -> None:
        while self._open and (not self._cuda or self._open[0].marks[-1].query()):
            step = self._open.pop(0)
            if self._last is not None:
                last, seconds = self._last
                idle = self._between(last.marks[-1], step.marks[0]) if step.follows else None
                self._listener(seconds, idle)
            whole = 0.0
            for stage, begin, end in zip(STAGES, step.marks[:-1], step.marks[1:], strict=True):
                seconds = self._between(begin, end)
                self.seconds[stage] += seconds
                whole += seconds
            self.steps += 1
            self._last = step, whole

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin


class _Step(NamedTuple):
    marks: list[Any]
    follows: bool  # nothing but the host was between it and the step before
