"""What is metered when a request's step has been processed."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.glue.after_step import request_end
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping
from sglang_dflash.metrics import AcceptanceAlarm
from tests.glue.test_sampling import Req

BLOCK = 4


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Bookkeeping:
    monkeypatch.setattr(request_end, "_meters", [])
    found = Bookkeeping(BLOCK, "cpu", AcceptanceAlarm(BLOCK))
    request_end.count_steps_in(found)
    return found


@pytest.mark.parametrize(("kept", "counted"), [(0, [0] * BLOCK), (2, [0, 1, 0, 0])])
def test_a_step_that_a_grammar_rejected_whole_is_not_metered(
    book: Bookkeeping, kept: int, counted: list[int]
) -> None:
    """It once counted as a full block, which raised the accept length."""
    req: Any = Req(
        rid="a",
        finished=lambda: True,
        output_ids=[5] * kept,
        origin_input_ids=[1],
        spec_verify_ct=1,
        spec_num_correct_drafts=max(0, kept - 1),
        spec_num_cap_tokens=0,
        finished_len=None,
        to_finish=None,
        grammar=object(),
    )
    request_end.finish_and_meter(lambda req, count: None, req, kept)
    assert book.meter.histogram == counted
