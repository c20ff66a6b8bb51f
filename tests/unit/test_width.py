"""The verify width: what is learnt from steps, and tokens per second in simulated serving."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglang_dflash.costs import GraphCosts, LearntCosts
from sglang_dflash.survival import Acceptance
from sglang_dflash.width import Choice, WidthPolicy
from tests.unit.test_costs import BLOCK, graph_costs


def draw(rng: np.random.Generator, rate: float, *, width: int, requests: int) -> list[int]:
    """Draw numbers of correct drafts, each correct at this rate after correct ones."""
    if rate == 0:
        return [0] * requests
    return np.minimum(rng.geometric(1 - rate, requests) - 1, width - 1).tolist()


def geometric(rate: float) -> np.ndarray:
    return rate ** np.arange(1, BLOCK)


class Server:
    """A server whose drafts are correct at a constant rate, on simulated time."""

    def __init__(
        self,
        requests: int,
        rate: float,
        *,
        costs: GraphCosts | LearntCosts | None = None,
        true_costs: GraphCosts | None = None,
        fixed: int | None = None,
    ) -> None:
        self.requests, self.rate = requests, rate
        self.now = 0.0
        self.tokens = 0
        self.widths: list[int] = []
        self.true_costs = true_costs or graph_costs()
        self.policy = WidthPolicy(
            BLOCK, costs or graph_costs(), fixed=fixed, clock=lambda: self.now
        )
        self._rng = np.random.default_rng(0)

    def step(self) -> int:
        choice = self.policy.choose(self.requests, 0)
        assert choice.rows is None
        width = choice.width
        ms = float(self.true_costs.step_ms(self.requests, 0)[width - 1])
        ms *= self._rng.normal(1, 0.02)
        correct = draw(self._rng, self.rate, width=width, requests=self.requests)
        self.now += ms / 1000
        self.tokens += self.requests + sum(correct)
        self.widths.append(width)
        self.policy.record(width, correct)
        self.policy.timed(self.requests, choice, 0, ms)
        return width

    def run(self, seconds: float) -> float:
        """Return tokens per second."""
        start, before = self.now, self.tokens
        while self.now < start + seconds:
            self.step()
        return (self.tokens - before) / (self.now - start)

    def best(self) -> tuple[float, float]:
        """Return tokens per second of the best width, and of width 1."""
        tokens = 1 + np.concatenate(([0], geometric(self.rate).cumsum()))
        rates = 1000 * self.requests * tokens / self.true_costs.step_ms(self.requests, 0)
        return float(rates.max()), float(rates[0])


@pytest.mark.parametrize("rate", [0.3, 0.8, 0.92])
@pytest.mark.parametrize("widths", [(2,), (4,), (16,), (2, 5, 16)])
def test_survival_is_found_at_any_width(rate: float, widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    acceptance = Acceptance(BLOCK)
    for k in range(300):
        width = widths[k % len(widths)]
        acceptance.record(width, draw(rng, rate, width=width, requests=64))
    # positions beyond the widest inherit the rate, so its error grows with the position
    assert acceptance.survival() == pytest.approx(geometric(rate), abs=0.06)
    assert acceptance.survival()[0] == pytest.approx(rate, abs=0.03)


def test_a_full_narrow_step_says_nothing_about_later_drafts() -> None:
    acceptance = Acceptance(BLOCK)
    for _ in range(200):
        acceptance.record(16, [3] * 8)
    assert acceptance.survival()[:4] == pytest.approx([1, 1, 1, 0], abs=0.02)
    acceptance.record(3, [2] * 8)
    assert acceptance.survival()[:4] == pytest.approx([1, 1, 1, 0], abs=0.02)


def test_without_evidence_survival_is_optimistic_and_width_1_is_none() -> None:
    acceptance = Acceptance(BLOCK)
    acceptance.record(1, [0] * 8)
    assert acceptance.survival() == pytest.approx(geometric(0.9))
    assert acceptance.tokens()[:2] == pytest.approx([1, 1.9])


@pytest.mark.parametrize(("requests", "steps"), [(1, 256), (32, 100), (32, 3000)])
def test_a_changed_rate_is_noticed(requests: int, steps: int) -> None:
    rng = np.random.default_rng(2)
    acceptance = Acceptance(BLOCK)
    for rate in (0.9, 0.3):
        for _ in range(steps):
            acceptance.record(8, draw(rng, rate, width=8, requests=requests))
    assert acceptance.survival()[0] == pytest.approx(0.3, abs=0.15 if requests == 1 else 0.07)


def test_a_long_run_does_not_overflow() -> None:
    acceptance = Acceptance(2)
    for _ in range(25_000):
        acceptance.record(2, [0, 1])
    assert acceptance.survival() == pytest.approx([0.5], abs=0.02)


def test_less_evidence_keeps_rates_and_learns_faster() -> None:
    acceptance = Acceptance(BLOCK)
    for _ in range(100):
        acceptance.record(2, [0] * 32)
    acceptance.forget(16)
    assert acceptance.survival()[0] == pytest.approx(1.8 / 18, abs=0.01)
    acceptance.record(2, [1] * 32)
    assert acceptance.survival()[0] > 0.6


@pytest.mark.parametrize("requests", [1, 8, 32, 64, 128, 256])
@pytest.mark.parametrize("rate", [0, 0.5, 0.8, 0.92])
def test_the_policy_is_near_the_best_width_and_never_below_width_1(
    requests: int, rate: float
) -> None:
    server = Server(requests, rate)
    best, narrow = server.best()
    achieved = server.run(20)
    assert achieved > 0.97 * best
    assert achieved > 0.98 * narrow


@pytest.mark.parametrize("requests", [1, 8, 32, 64])
def test_drafting_returns_when_it_pays_again(requests: int) -> None:
    server = Server(requests, 0)
    server.run(30)
    assert server.widths[-20:].count(1) > 15
    server.rate = 0.8
    server.run(10)
    best, _ = server.best()
    assert server.run(5) > 0.97 * best
    assert server.widths[-50:].count(1) == 0


def test_a_probe_comes_soon_and_then_ever_more_rarely() -> None:
    server = Server(64, 0)
    times = []
    while server.now < 60:
        if server.step() > 1:
            times.append(server.now)
    gaps = np.diff([time for time in times if time > 0.5])
    assert min(time for time in times if time > 0.5) < 2
    assert 1.9 < gaps[0] < 2.5 and gaps.max() < 11
    assert (gaps > 9).sum() >= 3


def test_a_probe_asks_one_request_several_times() -> None:
    server = Server(1, 0)
    server.run(60)
    before = len(server.widths)
    server.run(20)
    assert 16 <= sum(width > 1 for width in server.widths[before:]) <= 32


def test_probes_cost_at_most_one_percent() -> None:
    # a probe costs 1 s, a plain step 50 ms
    costs = GraphCosts(2, {64: 50.0, 128: 1040.0}, {64: 10.0})
    server = Server(64, 0, costs=costs, true_costs=costs)
    server.policy = WidthPolicy(2, costs, clock=lambda: server.now)
    server.run(20)
    probes = len([width for width in server.widths if width > 1])
    server.run(400)
    assert 2 <= len([width for width in server.widths if width > 1]) - probes <= 4


def test_widths_settle() -> None:
    server = Server(32, 0.8)
    server.run(30)
    changes = np.count_nonzero(np.diff(server.widths[100:]))
    assert changes < 0.2 * len(server.widths)


def test_a_graph_that_is_paid_for_is_filled() -> None:
    policy = WidthPolicy(BLOCK, GraphCosts(BLOCK, {4: 1.0, 8: 5.0, 32: 50.0}, {2: 0.0}))
    for _ in range(200):
        policy.record(BLOCK, [1])
    assert policy.choose(2, 0) == Choice(2)
    # alone, the third and fourth row promise less than the hysteresis, but cost nothing
    assert policy.expected_tokens(Choice(4), 1) < 1.02 * policy.expected_tokens(Choice(2), 1)
    assert policy.choose(1, 0) == Choice(4)


def test_a_corrected_graph_may_be_slower_than_a_larger_one() -> None:
    costs = GraphCosts(4, {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}, {1: 0.0})
    for _ in range(300):
        costs.record(1, 2, 0, 2.0)
    policy = WidthPolicy(4, costs)
    assert costs.step_ms(1, 0)[1] > costs.step_ms(1, 0)[3]
    assert [policy.choose(1, 0).width for _ in range(3)] == [4, 4, 4]


def test_hysteresis_keeps_a_width_that_is_nearly_best() -> None:
    # before any evidence a step of width 3 is expected to commit 2.71 tokens, of width 2 1.9
    for widest_ms, expected in ((2.68, 1), (2.6, 3)):
        policy = WidthPolicy(3, GraphCosts(3, {1: 1.0, 2: 2.0, 3: widest_ms}, {1: 0.0}))
        policy._timed_without = {1, 2, 3}
        assert policy.choose(3, 0).width == 1, "no graph holds more"
        assert policy.choose(1, 0).width == expected


@pytest.mark.parametrize(("requests", "expected"), [(1, 6), (256, 3), (1000, 1)])
def test_a_fixed_width_is_kept_where_it_is_possible(requests: int, expected: int) -> None:
    policy = WidthPolicy(BLOCK, graph_costs(), fixed=6)
    for _ in range(50):
        assert policy.choose(requests, 0, may_share=True) == Choice(expected)
        policy.record(expected, [0] * requests)


@pytest.mark.parametrize(("requests", "rate"), [(1, 0), (1, 0.8), (8, 0.5), (64, 0.5), (64, 0.8)])
def test_costs_that_are_learnt_serve_nearly_as_well(requests: int, rate: float) -> None:
    true_costs = GraphCosts(
        BLOCK,
        {rows: 5 + 0.2 * rows for rows in range(1, 1025)},
        {size: 2 + 0.2 * size for size in range(1, 65)},
    )
    server = Server(requests, rate, costs=LearntCosts(BLOCK), true_costs=true_costs)
    best, narrow = server.best()
    server.run(5)
    achieved = server.run(15)
    assert achieved > 0.95 * best
    assert achieved > 0.97 * narrow


def test_the_snapshot_is_json() -> None:
    for costs in (graph_costs(), LearntCosts(BLOCK)):
        server = Server(8, 0.8, costs=costs)
        server.run(2)
        snapshot = json.loads(json.dumps(server.policy.snapshot()))
        assert snapshot["mode"] == "auto"
        assert sum(snapshot["steps_by_width"].values()) == len(server.widths)
        assert snapshot["expected_tokens"] > 2
    assert WidthPolicy(BLOCK, graph_costs(), fixed=4).snapshot()["mode"] == 4


def test_new_requests_weaken_the_evidence_but_not_the_rates() -> None:
    policy = WidthPolicy(16, GraphCosts(16, {256: 20.0}, {16: 2.0}))
    for _ in range(100):
        policy.record(16, [2] * 8)
    before = policy.acceptance.survival()
    policy.admit(8, 8)
    assert policy.acceptance.survival()[:2] == pytest.approx(before[:2], abs=0.05)
    policy.record(16, [15] * 8)
    weakened = policy.acceptance.survival()[2]
    for _ in range(100):
        policy.record(16, [2] * 8)
    policy.record(16, [15] * 8)
    assert weakened > 3 * policy.acceptance.survival()[2]


def test_at_width_one_new_requests_are_asked_at_once() -> None:
    clock = [100.0]
    policy = WidthPolicy(
        16, GraphCosts(16, {64: 10.0, 1024: 90.0}, {64: 5.0}), clock=lambda: clock[0]
    )
    for _ in range(50):
        policy.record(16, [0] * 64)
    while policy.choose(64, 0).width > 1:
        clock[0] += 0.01
    clock[0] += 5
    assert policy.choose(64, 0).width > 1, "a probe"
    assert policy.choose(64, 0).width == 1
    policy.admit(64, 64)
    clock[0] += 1.5
    assert policy.choose(64, 0).width == 1, "not before probes are allowed again"
    clock[0] += 8
    assert policy.choose(64, 0).width > 1
