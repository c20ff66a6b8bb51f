"""A short storm in every test run; `python benchmarks/soak.py` is the long one."""

from __future__ import annotations

import soak


def test_a_storm_of_mixed_requests_leaves_nothing_wrong_and_nothing_behind() -> None:
    report = soak.run(soak.parse(["--requests", "90"]))
    assert soak.faults(report) == []
    assert set(report["by_kind"]) == set(soak.KINDS)
    assert report["aborted"] > 4
