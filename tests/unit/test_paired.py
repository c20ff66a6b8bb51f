"""Ratios of systems that took turns, and their intervals."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks import paired
from benchmarks.paired import Ratio


def point(*rounds: float, began: str | None = "today") -> dict[str, Any]:
    return {"tokens_per_s": 100.0, "rounds": list(rounds), "began": began}


@pytest.mark.parametrize(("count", "outside"), [(4, None), (5, 0), (7, 0), (8, 1), (32, 10)])
def test_the_interval_leaves_out_as_many_as_its_confidence_allows(
    count: int, outside: int | None
) -> None:
    """Of eight pairs, at most one lies below the true median with 9 / 256, and as many above."""
    assert paired.outside_of(count) == outside


def test_a_host_that_drifts_is_not_in_the_ratio() -> None:
    """Every pair has a speed of its own, and the same ratio."""
    speeds = (100.0, 180.0, 90.0, 200.0, 120.0)
    above = point(*(1.25 * speed for speed in speeds))
    assert paired.ratio_of(above, point(*speeds)) == Ratio(1.25, 1.25, 1.25)


def test_one_slow_round_moves_neither_the_ratio_nor_the_interval() -> None:
    rounds = [100.0 + n for n in range(8)]
    before = paired.ratio_of(point(*rounds), point(*[100.0] * 8))
    assert before == Ratio(pytest.approx(1.035), pytest.approx(1.01), pytest.approx(1.06))
    slow = paired.ratio_of(point(20.0, *rounds[1:]), point(*[100.0] * 8))
    assert slow == before


@pytest.mark.parametrize(
    "other",
    [point(*[50.0] * 5, began="yesterday"), point(*[50.0] * 4), {"tokens_per_s": 80.0}],
    ids=["another call", "too few", "an earlier file"],
)
def test_what_is_not_paired_is_the_ratio_of_the_rates(other: dict[str, Any]) -> None:
    above = point(*[70.0] * len(other.get("rounds", [0] * 5)))
    found = paired.ratio_of(above, {**other, "tokens_per_s": 80.0})
    assert found == Ratio(1.25) and found.text() == "1.250"


def test_a_ratio_is_surely_below_with_its_whole_interval() -> None:
    assert Ratio(0.96, 0.93, 0.97).is_below(0.98)
    assert not Ratio(0.96, 0.93, 0.99).is_below(0.98)
    assert Ratio(0.96).is_below(0.98) and not Ratio(0.99).is_below(0.98)
    assert Ratio(0.9613, 0.934, 0.99).text() == "0.961 [0.93, 0.99]"


def test_pairs_of_several_points_make_an_interval_together() -> None:
    few = [(point(110.0, 120.0, 130.0), point(100.0, 100.0, 100.0))] * 2
    assert paired.ratio_of(*few[0]) == Ratio(1.0)
    assert paired.pooled(few) == Ratio(1.2, 1.1, 1.3)
    assert paired.pooled([]) is None


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Of a skewed distribution: the interval would have to be wider if its form mattered."""
    chance = random.Random(3)
    held = 0
    for _ in range(2000):
        found = paired.summed_up([2 ** chance.expovariate(1.0) for _ in range(12)])
        assert found and found.low is not None and found.high is not None
        # the median of an exponential variable is ln 2
        held += found.low <= 2**0.693147 <= found.high
    assert 0.9 <= held / 2000 <= 0.99
