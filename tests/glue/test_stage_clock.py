"""Stage times on a GPU that runs behind its host: exact, and measured without synchronising."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_dflash.glue.after_step.stage_clock import STAGES, StageClock

STAGE_MS = {"draft": 2.0, "verify": 15.0, "commit": 0.5}


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
        return STAGE_MS[STAGES[self.place % (len(STAGES) + 1)]]

    def synchronize(self) -> None:
        raise AssertionError("waited for the GPU")


def test_stages_are_timed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)

    def wait(*_: Any) -> None:
        raise AssertionError("waited for the GPU")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    clock, marks = StageClock("cuda"), len(STAGES) + 1
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
