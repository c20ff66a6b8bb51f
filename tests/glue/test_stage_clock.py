"""Stage times on a GPU that runs behind its host: exact, and measured without synchronising."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_dflash.glue.after_step.stage_clock import STAGES, StageClock

STAGE_MS = {"draft": 2.0, "verify": 15.0, "commit": 0.5}
IDLE_MS = 1.25


class LateGpu:
    """Events in the order they were recorded; the first `passed` have completed."""

    def __init__(self) -> None:
        self.recorded = 0
        self.passed = 0

    def event(self, enable_timing: bool) -> LateEvent:
        assert enable_timing
        return LateEvent(self)


class LateEvent:
    def __init__(self, gpu: LateGpu) -> None:
        self.gpu = gpu
        self.place = -1

    def record(self) -> None:
        self.place, self.gpu.recorded = self.gpu.recorded, self.gpu.recorded + 1

    def query(self) -> bool:
        return self.place < self.gpu.passed

    def elapsed_time(self, end: LateEvent) -> float:
        # this is an error on a real device, too
        assert self.query() and end.query(), "asked for a time that has not passed"
        assert end.place == self.place + 1
        return (*STAGE_MS.values(), IDLE_MS)[self.place % (len(STAGES) + 1)]

    def synchronize(self) -> None:
        raise AssertionError("waited for the GPU")


def test_stages_are_timed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)

    def wait(*_: Any) -> None:
        raise AssertionError("waited for the GPU")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    clock, marks = StageClock("cuda"), len(STAGES) + 1
    told: list[Any] = []
    clock.tell(lambda *times: told.append(times))
    for step in range(10):
        # three steps behind, in mid-step
        gpu.passed = max(0, (step - 3) * marks + 2)
        for _ in range(marks):
            clock.mark()
        assert clock.steps == max(0, step - 3)
    gpu.passed = gpu.recorded + marks
    for _ in range(marks):
        clock.mark()
    assert clock.steps == 11
    assert clock.seconds == pytest.approx({k: 11 * ms / 1000 for k, ms in STAGE_MS.items()})
    # the last one's wait is not over
    whole = pytest.approx(sum(STAGE_MS.values()) / 1000)
    assert told == [(whole, IDLE_MS / 1000)] * 10


def test_times_on_the_host_are_told_with_those_until_the_next_step() -> None:
    clock = StageClock("cpu")
    told: list[tuple[float, float]] = []
    clock.tell(lambda seconds, until_next: told.append((seconds, until_next)))
    for _ in range(5 * (len(STAGES) + 1)):
        clock.mark()
    assert clock.steps == 5 and len(told) == 4
    assert all(seconds >= 0 and until_next >= 0 for seconds, until_next in told)
