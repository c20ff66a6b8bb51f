"""benchmarks/meter.py times what it says."""

from __future__ import annotations

import pytest

from benchmarks import meter
from sglang_dflash.glue.after_step import request_end
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping
from sglang_dflash.metrics import AcceptanceAlarm


def test_every_step_of_every_request_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting is a part of the time, and was left out once it was put off to the next step."""
    monkeypatch.setattr(request_end, "_books", [])
    book = Bookkeeping(meter.BLOCK_SIZE, "cpu", AcceptanceAlarm(meter.BLOCK_SIZE))
    request_end.count_steps_in(book)
    # on a busy machine either may be the longer one
    assert min(meter.host_seconds_per_step(4, 10, book)) > 0
    # all but the last step's requests, which the next result would count
    assert book._meter.verify_steps == 4 * 9
