"""Device time of each stage of a step, and until the next step begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

STAGES = ("draft", "verify", "commit")


class StageClock:
    """Time each stage without synchronising: events are read once the GPU has passed them."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._open: list[list[Any]] = []
        self._current: list[Any] = []
        # where the last step whose times are known ended, and its seconds
        self._last: tuple[Any, float] | None = None
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.steps = 0
        self._listener: Callable[[float, float], None] = lambda seconds, until_next: None

    def tell(self, listener: Callable[[float, float], None]) -> None:
        """Tell the listener the seconds of every step, in order, and those until the next one, once
        it has passed."""
        self._listener = listener

    def snapshot(self) -> dict[str, Any]:
        """Return the seconds of each stage so far, and the steps they were spent in."""
        return {"steps": self.steps, "seconds": dict(self.seconds)}

    def mark(self) -> None:
        """Mark a stage boundary: four marks make a step."""
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._current.append(moment)
        if len(self._current) == len(STAGES) + 1:
            self._open.append(self._current)
            self._current = []
            self._settle()

    def _settle(self) -> None:
        while self._open and (not self._cuda or self._open[0][-1].query()):
            marks = self._open.pop(0)
            if self._last is not None:
                ended, seconds = self._last
                self._listener(seconds, self._between(ended, marks[0]))
            whole = 0.0
            for stage, begin, end in zip(STAGES, marks[:-1], marks[1:], strict=True):
                seconds = self._between(begin, end)
                self.seconds[stage] += seconds
                whole += seconds
            self.steps += 1
            self._last = marks[-1], whole

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin
