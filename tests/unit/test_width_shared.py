"""Rows that a batch shares out: what is chosen, and tokens per second in simulated serving."""

from __future__ import annotations

import json
from collections import deque

import numpy as np
import pytest

from sglang_dflash.costs import GraphCosts, LearntCosts
from sglang_dflash.survival import Acceptance
from sglang_dflash.width import Choice, WidthPolicy
from tests.unit.test_confidence import BLOCK, Drafter, share_out, verified

# a 31B model on one H200
VERIFY_MS = {
    16: 16.6, 32: 17.8, 64: 18.2, 128: 19.2, 160: 20.6, 192: 21.4, 256: 24.3, 320: 31.1, 384: 33.6,
    448: 41.1, 512: 44.4, 640: 55.6, 768: 64.2,
}  # fmt: skip
DRAFT_MS = {1: 1.6, 16: 2.2, 32: 2.1, 48: 3.1}
HEAD_MS = {16: 0.5, 256: 0.9, 768: 2.4}
MS_PER_TOKEN = 2.4e-4
# results reach the policy so many steps late
LATE = 2
Times = tuple[float, float | None]


def graph_costs() -> GraphCosts:
    return GraphCosts(BLOCK, VERIFY_MS, DRAFT_MS, HEAD_MS, head_in_graph=16)


class Server:
    """A server that shares rows out, on simulated time."""

    def __init__(
        self,
        lengths: list[float],
        *,
        costs: GraphCosts | LearntCosts | None = None,
        true_costs: GraphCosts | None = None,
        context: int = 0,
        may_repeat: bool = False,
    ) -> None:
        self.may_repeat = may_repeat
        self.drafter = Drafter(lengths)
        self.requests = len(lengths)
        self.true_costs = true_costs or graph_costs()
        self.context = context
        self.now, self.tokens = 0.0, 0.0
        self.choices: list[Choice] = []
        self.policy = WidthPolicy(BLOCK, costs or graph_costs(), clock=lambda: self.now)
        self._late: deque[tuple[Choice, Times, np.ndarray, np.ndarray, np.ndarray]] = deque()
        self._rng = np.random.default_rng(0)

    def ms(self, choice: Choice) -> float:
        attention_ms = MS_PER_TOKEN * self.context
        if choice.rows is None:
            ms = float(self.true_costs.step_ms(self.requests, 0)[choice.width - 1]) + attention_ms
            return choice.passes * ms
        place = self.true_costs.shared(self.requests).rows.index(choice.rows)
        return float(self.true_costs.shared_ms(self.requests, 0)[place]) + attention_ms

    def times(self, choice: Choice) -> Times:
        """Return the ms of a step, and for how long the device then waits, if that is known."""
        return self.ms(choice), None

    def step(self) -> Choice:
        choice = self.policy.choose(
            self.requests, self.context, may_share=True, may_repeat=self.may_repeat
        )
        confidence, survival, correct = self.drafter.draw()
        rows = np.full(self.requests, choice.width)
        if choice.rows is not None:
            confidence = confidence[:, : choice.width - 1]
            rows = share_out(self.policy.calibration.survival(confidence), choice.rows)
            assert rows.sum() == choice.rows and rows.max() <= choice.width
        correct = np.minimum(correct, rows - 1)
        ms, idle_ms = self.times(choice)
        ms *= self._rng.normal(1, 0.02)
        self.now += (ms + (idle_ms or 0)) / 1000
        # in the mean over outcomes, which has less noise
        self.tokens += choice.passes * self.requests + float(verified(survival, rows).sum())
        self.choices.append(choice)
        self._late.append((choice, (ms, idle_ms), rows, confidence, correct))
        if len(self._late) > LATE:
            choice, times, rows, confidence, correct = self._late.popleft()
            if choice.rows is None:
                self.policy.record(choice.width, correct.tolist())
            else:
                self.policy.record_shared(rows, confidence, correct)
            self.policy.timed(self.requests, choice, self.context, *times)
        return self.choices[-1]

    def run(self, seconds: float) -> float:
        """Return tokens per second."""
        start, before = self.now, self.tokens
        while self.now < start + seconds:
            self.step()
        return (self.tokens - before) / (self.now - start)

    def best_uniform(self) -> tuple[float, float]:
        """Return tokens per second of the best width, in hindsight, and of width 1."""
        steps = 20_000 // self.requests
        survival = np.concatenate([self.drafter.draw().survival for _ in range(steps)])
        tokens = 1 + np.concatenate(([0], survival.mean(axis=0).cumsum()))
        rates = 1000 * self.requests * tokens / self.true_costs.step_ms(self.requests, 0)
        return float(rates.max()), float(rates[0])


def mixed(requests: int) -> list[float]:
    return [2.0] * (requests // 2) + [8.0] * (requests // 2)


@pytest.mark.parametrize(
    ("requests", "gain"), [(8, 0.98), (16, 1.1), (32, 1.15), (64, 1.15), (128, 1.12)]
)
def test_sharing_beats_the_best_width_where_requests_differ(requests: int, gain: float) -> None:
    server = Server(mixed(requests))
    best, _ = server.best_uniform()
    server.run(5)
    assert server.run(10) > gain * best


@pytest.mark.parametrize("requests", [2, 8, 32, 128, 256])
@pytest.mark.parametrize("length", [1.3, 4.2, 8.0])
def test_sharing_is_never_worse_than_the_best_width(requests: int, length: float) -> None:
    server = Server([length] * requests)
    best, narrow = server.best_uniform()
    server.run(5)
    achieved = server.run(10)
    assert achieved > 0.975 * best
    assert achieved > 0.985 * narrow


def test_the_curve_in_service_predicts_the_tokens() -> None:
    server = Server(mixed(64))
    server.run(10)
    choice = server.choices[-1]
    assert choice.rows is not None
    expected = server.policy.expected_tokens(choice, 64)
    before, steps = server.tokens, 100
    assert {server.step() for _ in range(steps)} == {choice}
    assert expected == pytest.approx((server.tokens - before) / steps / 64, rel=0.05)
    found = server.policy.snapshot()["shared"]
    assert isinstance(found, dict)
    assert found["expected_tokens"] == pytest.approx(expected, rel=0.05)
    assert found["tokens"] == pytest.approx(expected, rel=0.05)


def worst(server: Server, *, is_confident: bool) -> None:
    """Let no draft be correct any more."""
    if is_confident:
        server.drafter.is_wrong = True
    else:
        server.drafter.set_lengths([1.0] * server.requests)


@pytest.mark.parametrize("is_confident", [False, True])
@pytest.mark.parametrize("requests", [2, 32, 256])
def test_wrong_drafts_cost_at_most_one_percent(requests: int, is_confident: bool) -> None:
    server = Server([4.2] * requests)
    server.run(5)
    worst(server, is_confident=is_confident)
    narrow = 1000 * requests / server.ms(Choice(1))
    server.run(5)
    before = len(server.choices)
    assert server.run(60) > 0.985 * narrow
    assert any(choice.width > 1 for choice in server.choices[before:]), "it is tried again"


@pytest.mark.parametrize("requests", [8, 32, 128])
def test_a_confident_drafter_that_turns_wrong_is_dropped_within_steps(requests: int) -> None:
    server = Server([4.2] * requests)
    server.run(10)
    worst(server, is_confident=True)
    drafted = sum(server.step().width > 1 for _ in range(100))
    assert drafted < 25, "results come late, and a few requests say little"


@pytest.mark.parametrize("is_confident", [False, True])
@pytest.mark.parametrize("requests", [2, 32, 128])
def test_drafting_returns_when_it_pays_again(requests: int, is_confident: bool) -> None:
    server = Server([4.2] * requests)
    usual = server.run(10)
    worst(server, is_confident=is_confident)
    server.run(30)
    assert sum(choice.width == 1 for choice in server.choices[-40:]) > 25
    server.drafter.is_wrong = False
    server.drafter.set_lengths([4.2] * requests)
    server.run(40)
    assert server.run(5) > 0.97 * usual
    assert all(choice.rows for choice in server.choices[-40:])


@pytest.mark.parametrize(
    ("may_share", "requests", "is_shared"),
    [(True, 2, True), (True, 64, True), (False, 64, False), (True, 1, False), (True, 800, False)],
)
def test_rows_are_shared_out_only_where_they_can_be(
    may_share: bool, requests: int, is_shared: bool
) -> None:
    # 800: no graph has more rows than requests
    policy = WidthPolicy(BLOCK, graph_costs())
    assert (policy.choose(requests, 0, may_share=may_share).rows is not None) == is_shared


def test_before_any_step_each_request_is_taken_to_have_the_mean() -> None:
    policy = WidthPolicy(BLOCK, graph_costs())
    assert policy.expected_tokens(Choice(8, 128), 32) == policy.expected_tokens(Choice(4), 32)
    assert policy.expected_tokens(Choice(8, 144), 32) > policy.expected_tokens(Choice(4), 32)


def settled(costs: GraphCosts, requests: int, survival: float) -> WidthPolicy:
    """Return a policy that has seen all first drafts survive at this rate, and no other."""
    policy = WidthPolicy(BLOCK, costs)
    policy.curve.record(np.array([[survival] + [0.0] * (BLOCK - 2)] * requests))
    return policy


def test_a_larger_graph_does_not_win_for_nothing() -> None:
    # the larger graph is faster by less than what is noise; the last choice had no graph here
    for small_ms, rows in ((10.0, 16), (10.03, 16), (10.5, 32)):
        costs = GraphCosts(BLOCK, {8: 9.9, 16: small_ms, 32: 10.0, 128: 99.0}, {8: 0.0})
        policy = settled(costs, 8, 0.9)
        policy._last = Choice(1)
        assert policy.choose(8, 0, may_share=True).rows == rows


@pytest.mark.parametrize(
    ("last", "other_ms", "rows"), [(16, 9.9, 16), (16, 9.7, 32), (32, 9.9, 32), (32, 10.1, 16)]
)
def test_more_rows_must_be_better_by_some_percent_and_fewer_only_better(
    last: int, other_ms: float, rows: int
) -> None:
    policy = settled(GraphCosts(BLOCK, {16: 10.0, 32: other_ms}, {8: 0.0}), 8, 0.9)
    policy._last = Choice(16, last)
    assert policy.choose(8, 0, may_share=True).rows == rows


def test_a_batch_that_changes_keeps_the_nearest_choice() -> None:
    flat = {16 * k: 10.0 - 1e-6 * k for k in range(1, 49)}
    policy = settled(GraphCosts(BLOCK, flat, {64: 0.0}), 8, 0.9)
    policy._timed_without = set(flat)
    for last, requests, may_share, expected in (
        (Choice(16, 96), 20, True, Choice(16, 96)),
        (Choice(16, 96), 5, True, Choice(16, 80)),
        (Choice(4), 16, True, Choice(16, 64)),
        (Choice(16, 96), 24, False, Choice(4)),
    ):
        policy.acceptance = Acceptance(BLOCK)
        policy.acceptance.record(2, [0] * 64)
        policy._last = last
        policy._next_probe = float("inf")
        # all cost nearly the same, so the last is never beaten by enough
        assert policy.choose(requests, 0, may_share=may_share) == expected


def test_a_probe_verifies_few_drafts() -> None:
    clock = [0.0]
    policy = WidthPolicy(BLOCK, graph_costs(), clock=lambda: clock[0])
    for requests, rows, width in ((2, 32, 16), (10, 32, 16), (32, 64, 4), (120, 160, 4)):
        survival = np.zeros((requests, BLOCK - 1))
        policy.curve.keep(0)
        policy.curve.record(survival)
        for _ in range(20):
            clock[0] += 20
            if (choice := policy.choose(requests, 0, may_share=True)) != Choice(1):
                break
        assert choice == Choice(width, rows)
        # few requests are asked several times, others once
        for _ in range(max(1, 8 // requests) - 1):
            assert policy.choose(requests, 0, may_share=True) == choice
        assert policy.choose(requests, 0, may_share=True) == Choice(1)


def test_a_planned_probe_is_dropped_where_it_is_not_possible() -> None:
    clock = [100.0]
    policy = WidthPolicy(BLOCK, graph_costs(), clock=lambda: clock[0])
    policy.curve.record(np.zeros((2, BLOCK - 1)))
    for _ in range(40):
        policy.record(16, [0, 0])
    assert policy.choose(2, 0, may_share=True) == Choice(1)
    clock[0] += 20
    assert policy.choose(2, 0, may_share=True).rows == 32
    assert policy.choose(2, 0) == Choice(1)


def test_steps_that_share_teach_what_they_did_not_verify() -> None:
    """Rows were cut where confidence was low: the outcomes of the others alone would flatter."""
    policy, drafter = WidthPolicy(BLOCK, graph_costs()), Drafter([4.2] * 64)
    outcomes: list[bool] = []
    for _ in range(200):
        drawn = drafter.draw()
        rows = share_out(policy.calibration.survival(drawn.confidence), 128)
        policy.record_shared(rows, drawn.confidence, np.minimum(drawn.num_correct, rows - 1))
        outcomes += (drawn.num_correct[rows > 1] > 0).tolist()
    expected = np.mean([drafter.draw().survival for _ in range(200)], axis=(0, 1))
    assert policy.acceptance.survival()[:6] == pytest.approx(expected[:6], abs=0.05)
    assert np.mean(outcomes) > expected[0] + 0.08
    assert policy.expected_tokens(Choice(BLOCK), 64) == pytest.approx(4.2, rel=0.1)


def test_drafts_without_a_confidence_are_expected_to_fare_as_usual() -> None:
    policy = WidthPolicy(BLOCK, graph_costs())
    drafter = Drafter([4.2] * 64)
    for _ in range(200):
        drawn = drafter.draw()
        confidence = drawn.confidence[:, :5]
        rows = share_out(policy.calibration.survival(confidence), 192)
        policy.record_shared(rows, confidence, np.minimum(drawn.num_correct, rows - 1))
    assert policy.expected_tokens(Choice(16, 64 * 16), 64) == pytest.approx(4.2, rel=0.1)


def test_new_requests_weaken_the_curve() -> None:
    found = []
    for new in (0, 8):
        policy = WidthPolicy(BLOCK, graph_costs())
        for _ in range(50):
            policy.record_shared([2] * 8, np.full((8, 15), 0.01), [0] * 8)
        policy.admit(new, 8)
        policy.record_shared([2] * 8, np.full((8, 15), 0.999), [1] * 8)
        found.append(policy.expected_tokens(Choice(16, 128), 8))
    assert found[1] > 2 * found[0]


def test_the_time_of_a_step_corrects_its_graph() -> None:
    policy = WidthPolicy(BLOCK, graph_costs())
    for _ in range(100):
        policy.timed(32, Choice(8, 128), 0, 1.5 * (19.2 + 2.1 + 0.85))
    found = policy.costs.snapshot()["corrections"]
    assert isinstance(found, dict) and list(found) == ["128"] and found["128"] > 1.3


def linear_costs() -> GraphCosts:
    return GraphCosts(
        BLOCK,
        {rows: 5 + 0.2 * rows for rows in range(1, 1025)},
        {size: 2 + 0.2 * size for size in range(1, 65)},
    )


@pytest.mark.parametrize("requests", [2, 16, 64])
def test_costs_that_are_learnt_serve_nearly_as_well(requests: int) -> None:
    server = Server(mixed(requests), costs=LearntCosts(BLOCK), true_costs=linear_costs())
    best, narrow = server.best_uniform()
    server.run(5)
    assert [choice.rows for choice in server.choices[:12]] == [None] * 12, "costs are not known"
    achieved = server.run(15)
    assert achieved > 0.97 * best
    assert achieved > 0.97 * narrow


@pytest.mark.parametrize(("narrow_ms", "timed"), [(8.6, 8), (9.5, 0)])
def test_steps_without_drafts_are_timed_once_where_they_are_nearly_as_good(
    narrow_ms: float, timed: int
) -> None:
    costs = GraphCosts(BLOCK, {8: narrow_ms, 16: 14.0, 128: 99.0}, {8: 0.0})
    policy = settled(costs, 8, 0.9)
    chosen = [policy.choose(8, 0, may_share=True) for _ in range(20)]
    assert chosen == [Choice(1)] * timed + [Choice(16, 16)] * (20 - timed)


def test_a_drafter_that_is_slower_than_timed_does_not_make_plain_steps_look_slow() -> None:
    """Drafting just pays here by the graphs' times, and does not by its real ones. Contexts could
    explain that, too, but then steps without drafts would be as slow."""
    slow = {requests: 1.6 * ms for requests, ms in DRAFT_MS.items()}
    true = GraphCosts(BLOCK, VERIFY_MS, slow, HEAD_MS, head_in_graph=16)
    server = Server([2.0] * 128, true_costs=true, context=20_000)
    narrow = 1000 * 128 / server.ms(Choice(1))
    server.run(10)
    assert server.run(20) > 0.985 * narrow


def test_the_snapshot_is_json() -> None:
    for costs in (linear_costs(), LearntCosts(BLOCK)):
        server = Server(mixed(8), costs=costs, true_costs=linear_costs())
        shared = server.policy.snapshot()["shared"]
        assert isinstance(shared, dict) and shared["steps"] == 0 and shared["tokens"] is None
        server.run(2)
        snapshot = json.loads(json.dumps(server.policy.snapshot()))
        shared, steps = snapshot["shared"], server.choices[:-LATE]
        assert shared["steps"] == sum(choice.rows is not None for choice in steps)
        assert sum(snapshot["steps_by_width"].values()) == len(steps) - shared["steps"]
        last = next(choice.rows for choice in reversed(steps) if choice.rows)
        assert shared["rows"] == last and 1 < shared["mean_width"] <= 16
        assert len(shared["offsets"]) == len(shared["slopes"]) == BLOCK - 1
        assert shared["tokens"] == pytest.approx(shared["expected_tokens"], rel=0.2)
        assert snapshot["expected_tokens"] > 2
