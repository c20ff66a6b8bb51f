"""benchmarks/meter.py times what it says."""

from __future__ import annotations

import pytest

from benchmarks import meter
from sglang_dflash.glue.after_step import request_end
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping, StepRows
from sglang_dflash.metrics import AcceptanceAlarm


class Clock:
    """Stands still but for what is counted, so that a busy machine changes nothing."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_every_step_of_every_request_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting is a part of the time, and was left out once it was put off to the next step."""
    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    monkeypatch.setattr(request_end, "_books", [])
    book = Bookkeeping(meter.BLOCK_SIZE, "cpu", AcceptanceAlarm(meter.BLOCK_SIZE))
    count = book.begin_result

    def count_for_a_second(rows: StepRows) -> None:
        clock.now += 1
        count(rows)

    monkeypatch.setattr(book, "begin_result", count_for_a_second)
    request_end.count_steps_in(book)
    assert meter.host_seconds_per_step(4, 10, book) == (1, 0)
    # all but the last step's requests, which the next result would count
    assert book._meter.verify_steps == 4 * 9
