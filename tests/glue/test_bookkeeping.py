"""The requests of a step, counted together."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping, StepRows
from sglang_dflash.glue.after_step.exporter import PrometheusExporter
from sglang_dflash.metrics import AcceptanceAlarm, AcceptanceMeter

BLOCK = 4
# steps: what they verified, then (correct drafts, tokens committed, rows) of each request
STEPS = [
    (StepRows(4, 2.5), [(3, 4, 4), (0, 1, 4), (0, 1, 4), (2, 1, 4)]),
    (StepRows(1, 4.0, passes=4), [(3, 4, 1), (3, 2, 1)]),
    (StepRows(2, 1.5), [(1, 2, 2), (1, 2, 2)]),
]


def record(book: Bookkeeping, *, ended: bool = False) -> None:
    for rows, requests in STEPS:
        book.begin_result(rows)
        for num_correct, committed, width in requests:
            book.record(num_correct, committed, width, context=10, ended=ended)


def counted() -> AcceptanceMeter:
    """Return the counts of the steps, taken one request after the other."""
    meter = AcceptanceMeter(BLOCK)
    for rows, requests in STEPS:
        for num_correct, committed, width in requests:
            if rows.passes > 1:
                for _ in range(committed):
                    meter.record(0, 1, 1, 1.0)
            else:
                meter.record(num_correct, committed, width, rows.expected)
    return meter


def test_requests_counted_together_count_as_one_by_one() -> None:
    book = Bookkeeping(BLOCK, "cpu", AcceptanceAlarm(BLOCK))
    record(book)
    assert book.meter == counted()
    # nothing is counted twice
    assert book.meter == counted()


def test_the_alarm_hears_of_every_request(caplog: pytest.LogCaptureFixture) -> None:
    alarm = AcceptanceAlarm(BLOCK, threshold=3.0, window=8)
    book = Bookkeeping(BLOCK, "cpu", alarm)
    with caplog.at_level(logging.WARNING):
        record(book)
        assert not alarm.raised
        # the last step's requests are counted with the result of the next one
        book.begin_result(StepRows(BLOCK))
    assert alarm.raised == 1
    # of the window only the first step is wide enough to be judged
    assert "1.75 tokens per step over the last 4 steps" in caplog.text


def test_counters_are_exact_when_a_request_ends() -> None:
    """A scrape between two requests must not miss the end of the first."""
    book = Bookkeeping(BLOCK, "cpu", AcceptanceAlarm(BLOCK))
    labels = {"model_name": "test_bookkeeping"}
    registry = CollectorRegistry()
    book._export = PrometheusExporter(labels, BLOCK, registry)

    def value(name: str, **by: str) -> float:
        found = registry.get_sample_value(f"sglang:dflash_{name}", labels | by)
        assert found is not None, name
        return found

    # a series exists before its first count, as rate() needs
    assert value("verify_steps_at_width_total", width="3") == 0
    record(book, ended=True)
    meter = counted()
    assert value("verify_steps_total") == meter.verify_steps
    assert value("committed_tokens_total") == meter.committed_tokens
    assert value("expected_tokens_total") == meter.expected_tokens
    for width, steps in enumerate(meter.at_width, start=1):
        assert value("verify_steps_at_width_total", width=str(width)) == steps
    for position, steps in enumerate(meter.accepted_at, start=1):
        assert value("accepted_at_position_total", position=str(position)) == steps
    assert value("committed_tokens_per_step_sum") == meter.committed_tokens
