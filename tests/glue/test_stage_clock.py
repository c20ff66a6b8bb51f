"""Stage times on a GPU that runs behind its host: exact, and measured without synchronising."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_dflash.glue.after_step.stage_clock import STAGES, StageClock, StepTime

STAGE_MS = {"draft": 2.0, "verify": 15.0, "commit": 0.5}
BETWEEN_MS = 1.25


class Gpu:
    """A device with a time line: work is done in order, none before the host has launched it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_ms = 0.0
        self.device_ms = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self, enable_timing))
        monkeypatch.setattr(torch.cuda, "synchronize", wait)

    def prepare(self, ms: float) -> None:
        """Let the host work."""
        self.host_ms += ms

    def launch(self, ms: float) -> None:
        self.device_ms = max(self.device_ms, self.host_ms) + ms


class Event:
    def __init__(self, gpu: Gpu, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu = gpu
        self.at_ms = float("inf")

    def record(self) -> None:
        self.gpu.launch(0.0)
        self.at_ms = self.gpu.device_ms

    def query(self) -> bool:
        return self.at_ms <= self.gpu.host_ms

    def elapsed_time(self, end: Event) -> float:
        # this is an error on a real device, too
        assert self.query() and end.query(), "asked for a time that has not passed"
        return end.at_ms - self.at_ms


def wait(*_: Any) -> None:
    raise AssertionError("waited for the GPU")


def run(gpu: Gpu, clock: StageClock, steps: int, prepare: Callable[[str], float]) -> None:
    """Run steps; the host prepares each launch for as many ms as `prepare` says."""
    for _ in range(steps):
        clock.mark()
        for stage, ms in STAGE_MS.items():
            gpu.prepare(prepare(stage))
            if stage != "commit":
                clock.launches_graph()
            gpu.launch(ms)
            clock.mark()
        gpu.prepare(prepare("next"))
        gpu.launch(BETWEEN_MS)


def told_by(clock: StageClock) -> list[StepTime]:
    told: list[StepTime] = []
    clock.tell(told.append)
    return told


def test_stages_are_timed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is far ahead: all of the device's time is work, and what is launched between two
    steps is no wait."""
    gpu, clock = Gpu(monkeypatch), StageClock("cuda")
    told = told_by(clock)
    gpu.launch(50.0)  # a prefill
    run(gpu, clock, 10, lambda _: 0.5)
    assert clock.steps == 0
    gpu.host_ms = gpu.device_ms
    run(gpu, clock, 1, lambda _: 0.0)
    assert clock.steps == 10
    assert clock.seconds == pytest.approx({k: 10 * ms / 1000 for k, ms in STAGE_MS.items()})
    # what follows the last one is not known yet
    whole = pytest.approx(sum(STAGE_MS.values()) / 1000)
    assert told == [(whole, 0.0, 0.0)] * 9


def test_waits_for_a_slow_host_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, clock = Gpu(monkeypatch), StageClock("cuda")
    told = told_by(clock)
    host_ms = {"draft": 4.0, "verify": 6.0, "commit": 0.0, "next": 20.0}
    run(gpu, clock, 6, host_ms.__getitem__)
    # once the last step's end has run, the first graph is awaited for the rest of 4 ms; while it
    # runs, the host prepares the second for 6 ms; then the next step for 20 ms
    waiting = (4.0 - BETWEEN_MS + 6.0 - STAGE_MS["draft"]) / 1000
    whole = sum(STAGE_MS.values()) / 1000 + waiting
    idle = (20.0 - STAGE_MS["verify"] - STAGE_MS["commit"] + BETWEEN_MS) / 1000
    assert len(told) >= 4
    for step in told[1:]:
        assert step == pytest.approx((whole, waiting, idle))


def test_a_wait_before_one_graph_is_no_wait_before_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch drafts in turns, a stage has several graphs; the device may have passed its
    boundary, and yet be busy with the first of them."""
    gpu, clock = Gpu(monkeypatch), StageClock("cuda")
    told = told_by(clock)
    for _ in range(3):
        clock.mark()
        gpu.prepare(1.0)
        for _ in range(3):
            clock.launches_graph()
            gpu.launch(2.0)
            gpu.prepare(0.5)
        clock.mark()
        clock.launches_graph()
        gpu.launch(15.0)
        clock.mark()
        clock.mark()
        gpu.prepare(100.0)
    assert told and told[-1].waiting == pytest.approx(0.001)
    assert told[-1].whole == pytest.approx(0.022)


def test_times_on_the_host_are_told_with_those_until_the_next_step() -> None:
    clock = StageClock("cpu")
    told = told_by(clock)
    for _ in range(5 * (len(STAGES) + 1)):
        clock.mark()
    assert clock.steps == 5 and len(told) == 4
    assert all(step.whole >= 0 and step.waiting == 0 and step.idle_after >= 0 for step in told)
