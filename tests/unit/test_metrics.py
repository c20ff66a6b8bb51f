from __future__ import annotations

from sglang_dflash.metrics import AcceptanceMeter


def test_meter_counts_steps_by_tokens_committed() -> None:
    meter = AcceptanceMeter(block_size=4)
    for num_correct in (0, 3, 1):
        meter.record(num_correct, num_correct + 1)
    assert meter.snapshot() == {
        "verify_steps": 3,
        "drafted_tokens": 9,
        "accepted_tokens": 4,
        "committed_tokens": 7,
        "accept_length": round(7 / 3, 4),
        "histogram": [1, 1, 0, 1],
        "position_rates": [round(2 / 3, 4), round(1 / 3, 4), round(1 / 3, 4)],
    }


def test_meter_does_not_count_what_a_stop_cuts_off() -> None:
    """Three drafts were right, the second one ended the text."""
    meter = AcceptanceMeter(block_size=4)
    meter.record(3, 2)
    assert meter.snapshot()["histogram"] == [0, 1, 0, 0]
    assert meter.snapshot()["accepted_tokens"] == 2
    assert meter.snapshot()["committed_tokens"] == 2


def test_meter_is_zero_before_the_first_step() -> None:
    snapshot = AcceptanceMeter(block_size=3).snapshot()
    assert snapshot["accept_length"] == 0.0
    assert snapshot["position_rates"] == [0.0, 0.0]
