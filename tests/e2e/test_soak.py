"""A short storm in every test run; `python benchmarks/soak.py` is the long one."""

from __future__ import annotations

import pytest
import soak

from server import SCHEDULES


def test_a_storm_of_mixed_requests_leaves_nothing_wrong_and_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With overlap and plan stream: more happens at once, and requests end a step late."""
    for name, value in SCHEDULES["plan stream"].items():
        monkeypatch.setenv(name, value)
    report = soak.run(soak.parse(["--requests", "90"]))
    assert soak.faults(report) == []
    assert set(report["by_kind"]) == set(soak.KINDS)
    assert report["aborted"] > 4


def test_only_tokens_that_are_equal_in_fp64_count_as_a_tie() -> None:
    """Otherwise the storm would excuse wrong answers."""
    ask = {"body": {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0.0}}}
    assert soak.gap_at_first_difference(ask, [8, 9, 10], [8, 11, 10]) > soak.TIE
    assert soak.gap_at_first_difference(ask, [8, 9], [8]) == float("inf")
