from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.environment import Environment
from sglang_dflash.metrics import (
    LONG_CONTEXT,
    AcceptanceAlarm,
    AcceptanceMeter,
    replicas_of,
    together,
)


def test_meter_counts_steps_by_tokens_committed() -> None:
    meter = AcceptanceMeter(block_size=4)
    for num_correct in (0, 3, 1):
        meter.record(num_correct, num_correct + 1, expected=2.25)
    assert meter.snapshot() == {
        "verify_steps": 3,
        "drafted_tokens": 9,
        "accepted_tokens": 4,
        "committed_tokens": 7,
        "expected_tokens": 6.75,
        "accept_length": round(7 / 3, 4),
        "verified_rows": 12,
        "histogram": [1, 1, 0, 1],
        "accepted_at": [2, 1, 1],
        "at_width": [0, 0, 0, 3],
        "position_rates": [round(2 / 3, 4), round(1 / 3, 4), round(1 / 3, 4)],
    }


def test_meter_does_not_count_what_a_stop_cuts_off() -> None:
    """Three drafts were correct, but the second one ended the text."""
    meter = AcceptanceMeter(block_size=4)
    meter.record(3, 2)
    assert meter.snapshot()["histogram"] == [0, 1, 0, 0]
    assert meter.snapshot()["accepted_tokens"] == 2
    assert meter.snapshot()["committed_tokens"] == 2


def test_meter_is_zero_before_the_first_step() -> None:
    snapshot = AcceptanceMeter(block_size=3).snapshot()
    assert snapshot["accept_length"] == 0.0
    assert snapshot["position_rates"] == [0.0, 0.0]


def test_meter_tells_what_came_since() -> None:
    meter = AcceptanceMeter(block_size=4)
    meter.record(2, 3, expected=1.5)
    earlier = meter.copy()
    meter.record(0, 1, expected=2)
    meter.record(3, 4, expected=3)
    assert earlier.histogram == [0, 0, 1, 0]
    assert meter.since(earlier).histogram == [1, 0, 0, 1]
    assert meter.since(earlier).accepted_at == [1, 1, 1]
    expected = "accept length 2.50 (expected 2.50) of width 4.0 over 2 steps, 1:50% 4:50%"
    assert expected in meter.since(earlier).line()


def replica(dp_rank: int, steps: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the /server_info state of a replica that took these steps."""
    meter = AcceptanceMeter(block_size=4)
    for num_correct, committed in steps:
        meter.record(num_correct, committed)
    counts = {
        "alarms": dp_rank,
        "free_kv_slots": 100,
        "acceptance": meter.snapshot(),
        "stages": {"steps": 2, "seconds": {"draft": 0.25, "verify": 1.0 + dp_rank}},
    }
    return {"sglang_dflash": {"dp_rank": dp_rank, "ops": "torch", **counts}}


def test_replicas_are_named_and_summed() -> None:
    """Rates over 3 and over 4 steps do not survive rounding, so counts are summed, not rates."""
    steps = [[(0, 1), (0, 1), (1, 2)], [(3, 4), (2, 2), (0, 1), (0, 1)]]
    # replicas answer in any order
    info = {"internal_states": [replica(1, steps[1]), replica(0, steps[0])]}
    replicas = replicas_of(info)
    assert list(replicas) == ["dp_rank 0", "dp_rank 1"]
    assert replicas["dp_rank 0"]["acceptance"]["verify_steps"] == 3
    both = together(replicas)
    meter = AcceptanceMeter(block_size=4)
    for num_correct, committed in steps[0] + steps[1]:
        meter.record(num_correct, committed)
    assert both["acceptance"] == meter.snapshot()
    assert (both["alarms"], both["free_kv_slots"], both["ops"]) == (1, 200, "torch")
    assert both["stages"] == {"steps": 4, "seconds": {"draft": 0.5, "verify": 3.0}}
    assert replicas_of({"internal_states": [{}, {}]}) == {}


def warnings_of(alarm: AcceptanceAlarm, steps: list[tuple[int, int]]) -> list[str]:
    found = [
        alarm.record(correct, correct + 1, 8, is_long=context > LONG_CONTEXT)
        for correct, context in steps
    ]
    return [warning for warning in found if warning is not None]


def test_alarm_speaks_once_and_again_after_a_recovery() -> None:
    alarm = AcceptanceAlarm(block_size=8, threshold=1.5, window=10)
    bad, good = [(0, 100)] * 10, [(3, 100)] * 10
    assert len(warnings_of(alarm, bad + bad + bad)) == 1
    assert len(warnings_of(alarm, good + bad)) == 1
    assert alarm.raised == 2
    assert warnings_of(AcceptanceAlarm(block_size=8, threshold=0.0, window=1), bad) == []


@pytest.mark.parametrize(
    ("steps", "cause"),
    [
        ([(0, 100)] * 9 + [(1, 100)], "was trained for another target"),
        ([(1, 100)] * 6 + [(0, 100)] * 4, "starts high and decays fast"),
        ([(1, 100)] * 3 + [(0, 100)] * 7, "too weak"),
        ([(3, 100)] * 3 + [(0, 9000)] * 12, "long contexts: accept length is 4.00"),
    ],
)
def test_alarm_names_the_cause_by_its_signature(steps: list[tuple[int, int]], cause: str) -> None:
    alarm = AcceptanceAlarm(block_size=8, threshold=1.9, window=len(steps))
    [warning] = warnings_of(alarm, steps)
    assert cause in warning
    assert "SGLANG_DFLASH_ALARM" in warning


def test_alarm_reads_its_switches_strictly() -> None:
    alarm = AcceptanceAlarm.from_environment(
        Environment({"SGLANG_DFLASH_ALARM": "2.5", "SGLANG_DFLASH_ALARM_WINDOW": "50"}),
        block_size=8,
    )
    assert (alarm.threshold, alarm.window) == (2.5, 50)
    with pytest.raises(ValueError, match="SGLANG_DFLASH_ALARM=low is not a number of at least 0"):
        AcceptanceAlarm.from_environment(Environment({"SGLANG_DFLASH_ALARM": "low"}), block_size=8)
