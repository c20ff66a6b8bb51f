"""Widths where the host sets the pace: the time of a step is the host's, whatever its rows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglang_dflash.costs import GraphCosts
from sglang_dflash.host_times import ENOUGH_STEPS, KEPT_STEPS, RECENT_STEPS, HostTimes, Kind
from sglang_dflash.width import PASSES, Choice
from tests.unit.test_confidence import BLOCK, Drafter
from tests.unit.test_width_shared import Server, Times, mixed
from tests.unit.test_width_shared import graph_costs as large_model

# a target of 135M parameters on one H200
VERIFY_MS = {16: 0.9, 64: 0.95, 128: 1.0, 256: 1.2, 512: 1.6, 1024: 2.6, 1280: 3.2}
DRAFT_MS = {1: 0.3, 16: 0.4, 64: 0.6, 128: 1.0}
HOST_MS = {Kind.PLAIN: 2.1, Kind.UNIFORM: 3.2, Kind.SHARED: 4.4, Kind.REPEATED: 1.3 + 8 * 0.8}
# and for a step of plain decoding, which SGLang serves
PLAIN_DECODING_MS = 1.4
# of the time that the device waits for the host, so much lies where it is taken for work
UNSEEN = 0.1


def small_model(*, overlaps: bool = True) -> GraphCosts:
    return GraphCosts(BLOCK, VERIFY_MS, DRAFT_MS, overlaps=overlaps)


class HostPaced(Server):
    """A server whose device waits for the host unless a step has many rows."""

    def __init__(
        self, lengths: list[float], *, overlaps: bool = True, may_repeat: bool = False
    ) -> None:
        super().__init__(
            lengths,
            costs=small_model(overlaps=overlaps),
            true_costs=small_model(),
            may_repeat=may_repeat,
        )

    def host_ms(self, choice: Choice) -> float:
        # the host also does something for each request
        return HOST_MS[Kind.of(*choice)] * (1 + self.requests / 128)

    def times(self, choice: Choice) -> Times:
        device_ms = self.ms(choice)
        wait = max(0.0, self.host_ms(choice) - device_ms)
        return device_ms + UNSEEN * wait, (1 - UNSEEN) * wait + 0.02

    def step_ms(self, choice: Choice) -> float:
        return max(self.ms(choice), self.host_ms(choice)) + 0.02

    def rate_of(self, choice: Choice) -> float:
        """Return tokens per second if every step were this one, of one width."""
        draws = [self.drafter.draw().survival for _ in range(4000 // self.requests)]
        tokens = 1 + np.concatenate(draws)[:, : choice.width - 1].sum(axis=1).mean()
        return float(1000 * self.requests * choice.passes * tokens / self.step_ms(choice))


@pytest.mark.parametrize("requests", [1, 8, 32, 64])
@pytest.mark.parametrize("length", [1.3, 2.5, 4.2])
def test_where_the_host_sets_the_pace_no_fixed_width_is_better(
    requests: int, length: float
) -> None:
    server = HostPaced([length] * requests)
    full, plain = server.rate_of(Choice(BLOCK)), server.rate_of(Choice(1))
    server.run(2)
    achieved = server.run(10)
    assert achieved > 0.98 * full
    assert achieved > 0.98 * plain


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("length", [1.0, 1.3, 2.1, 4.2])
def test_where_drafts_fail_several_passes_run_in_a_step(requests: int, length: float) -> None:
    """Then it is not slower than plain decoding, of which a step takes the host less time."""
    server = HostPaced([length] * requests, may_repeat=True)
    full, repeated = server.rate_of(Choice(BLOCK)), server.rate_of(Choice(1, passes=PASSES))
    plain = 1000 * requests / (PLAIN_DECODING_MS * (1 + requests / 128) + 0.02)
    assert repeated > plain
    server.run(2)
    achieved = server.run(10)
    assert achieved > 0.97 * max(full, repeated)
    assert achieved > plain


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize(("gain", "pays"), [(1.03, False), (1.2, True)])
def test_several_passes_need_the_gain_that_they_are_measured_to_have(
    requests: int, gain: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin on a guess, the device's time. Once they ran they went on if they gained at all,
    though a request that stops leaves most of a step's passes unused."""
    monkeypatch.setitem(HOST_MS, Kind.REPEATED, PASSES * HOST_MS[Kind.PLAIN] / gain)
    server = HostPaced([1.0] * requests, may_repeat=True)
    server.run(20)
    choices = server.choices
    repeated = [choice for choice in choices if choice.passes > 1]
    if pays:
        # of the time: a step of a probe is shorter
        assert sum(map(server.step_ms, repeated)) > 0.9 * sum(map(server.step_ms, choices))
    else:
        assert len(repeated) < 0.02 * len(choices)


def test_probes_from_several_passes_cost_no_more_than_others() -> None:
    """Requests come and go, and each admission may bring a probe. The wait behind its first step
    is not its own, so that a probe of one step never learnt what drafting takes the host."""

    class Churning(HostPaced):
        last = Choice(BLOCK)

        def times(self, choice: Choice) -> Times:
            device_ms, idle_ms = super().times(choice)
            is_own, self.last = choice.passes == self.last.passes, choice
            if len(self.choices) % 4 == 0:
                self.policy.admit(1, self.requests)
            return device_ms, idle_ms if is_own else None

    server = Churning([1.0] * 32, may_repeat=True)
    server.run(5)
    begun = len(server.choices)
    server.run(20)
    drafting = [choice for choice in server.choices[begun:] if choice.width > 1]
    assert sum(map(server.step_ms, drafting)) / 20_000 < 0.05
    known = server.policy.costs.snapshot()["host_ms"]
    assert {"shared", "repeated"} <= set(known)


class Texts(HostPaced):
    """Texts of 256 tokens that begin together. Drafts fare worse in the first 32 of them."""

    def __init__(self, requests: int, first: float, then: float) -> None:
        super().__init__([first] * requests, may_repeat=True)
        self._lengths, self._is_new, self._begun = (first, then), True, 0.0

    def step(self) -> Choice:
        progress = (self.tokens - self._begun) / self.requests
        if progress >= 256:
            self._begun, progress = self.tokens, 0.0
            self.policy.admit(self.requests, self.requests)
        if self._is_new != (is_new := progress < 32):
            self._is_new = is_new
            self.drafter.set_lengths([self._lengths[not is_new]] * self.requests)
        return super().step()

    @classmethod
    def rate(cls, requests: int, lengths: tuple[float, float], choice: Choice) -> float:
        """Return tokens per second if every step were this one."""
        server = cls(requests, *lengths)
        server.policy.choose = lambda *_, **__: choice  # type: ignore[method-assign]
        return server.run(4)


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("lengths", [(2.3, 3.6), (1.7, 2.1)])
def test_drafts_that_fail_at_the_beginning_of_a_text_are_tried_again_in_it(
    requests: int, lengths: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer was over before the next probe, and the next one began like it."""
    # measured with SmolLM2 on an H200
    for kind, ms in {Kind.PLAIN: 2.4, Kind.UNIFORM: 2.75, Kind.REPEATED: 8.4}.items():
        monkeypatch.setitem(HOST_MS, kind, ms)
    full = Texts.rate(requests, lengths, Choice(BLOCK))
    repeated = Texts.rate(requests, lengths, Choice(1, passes=PASSES))
    server = Texts(requests, *lengths)
    server.run(3)
    achieved = server.run(10)
    assert achieved > 0.97 * full
    assert achieved > 0.92 * repeated


def test_several_passes_stop_once_drafts_pay_again() -> None:
    server = HostPaced([1.0] * 8, may_repeat=True)
    server.run(5)
    assert server.choices[-1].passes == PASSES
    server.drafter = Drafter([6.0] * 8)
    server.run(12)
    assert Choice(1, passes=PASSES) not in server.choices[-100:]


@pytest.mark.parametrize("requests", [32, 64])
def test_tokens_that_are_processed_later_do_not_keep_drafting_away(requests: int) -> None:
    """The tokens of eight passes take the host time behind the step after them."""

    class Processing(HostPaced):
        last = Choice(BLOCK)

        def step_ms(self, choice: Choice) -> float:
            return super().step_ms(choice) + self.processing_ms(choice)

        def processing_ms(self, choice: Choice) -> float:
            tokens = PASSES if choice.passes > 1 else 3
            return 0.001 * self.requests * (8 + 5 * tokens)

        def times(self, choice: Choice) -> Times:
            device_ms, idle_ms = super().times(choice)
            assert idle_ms is not None
            is_own = choice.passes == self.last.passes
            late_ms, self.last = self.processing_ms(self.last), choice
            self.now += 0 if is_own else (idle_ms + late_ms) / 1000
            return device_ms, idle_ms + late_ms if is_own else None

    server = Processing([1.0] * requests, may_repeat=True)
    server.run(5)
    assert server.choices[-1].passes == PASSES
    server.drafter = Drafter([4.2] * requests)
    server.run(15)
    full, repeated = server.rate_of(Choice(BLOCK)), server.rate_of(Choice(1, passes=PASSES))
    assert full > 1.05 * repeated
    assert server.run(10) > 0.97 * full


@pytest.mark.parametrize("requests", [1, 64])
def test_a_device_that_is_busy_runs_one_pass_a_step(requests: int) -> None:
    """More would gain nothing, and tokens would arrive in lumps."""
    server = Server([1.0] * requests, costs=large_model(), may_repeat=True)
    server.run(20)
    assert {choice.passes for choice in server.choices} == {1}


@pytest.mark.parametrize("length", [2.1, 3.7])
def test_equal_widths_are_found_where_no_graph_holds_full_blocks(length: float) -> None:
    """128 blocks of 16 are more than the largest graph; 8 rows each are not, and cost nothing."""
    server = HostPaced([length] * 128)
    assert np.isfinite(server.true_costs.step_ms(128, 0)).sum() < BLOCK
    equal = server.rate_of(Choice(8))
    server.run(3)
    assert server.run(10) > 0.97 * equal


@pytest.mark.parametrize("requests", [1, 32])
def test_rows_that_cost_nothing_are_taken(requests: int) -> None:
    server = HostPaced([4.2] * requests)
    server.run(2)
    first = len(server.choices)
    server.run(5)
    chosen = server.choices[first:]
    assert chosen.count(Choice(BLOCK)) > 0.97 * len(chosen)


@pytest.mark.parametrize("requests", [8, 32, 128])
@pytest.mark.parametrize("length", [1.3, 2.5, 4.2])
def test_without_overlap_the_hosts_time_is_added(requests: int, length: float) -> None:
    class InTurns(HostPaced):
        """The host works while the device stands still."""

        def times(self, choice: Choice) -> Times:
            return self.ms(choice), self.host_ms(choice)

        def step_ms(self, choice: Choice) -> float:
            return self.ms(choice) + self.host_ms(choice)

    server = InTurns([length] * requests, overlaps=False)
    best = max(server.rate_of(Choice(width)) for width in (1, 4, 8, 16))
    server.run(3)
    assert server.run(10) > 0.97 * best


@pytest.mark.parametrize("requests", [2, 8, 64])
def test_a_device_that_is_never_idle_is_all_that_counts(requests: int) -> None:
    """What SGLang launches between two steps is no wait for the host."""

    class Busy(Server):
        def times(self, choice: Choice) -> Times:
            return self.ms(choice), 0.1

    busy, silent = Busy(mixed(requests)), Server(mixed(requests))
    assert busy.run(5) == pytest.approx(silent.run(5), rel=0.01)
    assert busy.policy.costs.snapshot()["host_ms"] == {}


def test_a_change_of_load_is_noticed_at_once() -> None:
    server = HostPaced([4.2] * 32)
    server.run(3)
    policy = server.policy
    assert policy.choose(32, 0, may_share=True) == Choice(BLOCK)
    # a choice is held for a few steps, but not for another number of requests or kind of batch
    asked = []
    step_ms = policy.costs.step_ms

    def count(requests: int, context: int) -> np.ndarray:
        asked.append(requests)
        return step_ms(requests, context)

    policy.costs.step_ms = count  # type: ignore[method-assign]
    for _ in range(18):
        policy.choose(32, 0, may_share=True)
    assert len(asked) <= 2
    policy.choose(31, 0, may_share=True)
    policy.choose(31, 0, may_share=False)
    policy.choose(31, 0, may_share=False)
    assert asked[-2:] == [31, 31]
    policy.admit(1, 31)
    policy.choose(31, 0, may_share=False)
    assert asked[-3:] == [31, 31, 31]


def test_the_time_of_a_kind_is_the_median_of_recent_steps() -> None:
    times = HostTimes()
    assert times.ms(Kind.SHARED, 8) == 0
    assert not times.record(Kind.SHARED, 8, 3.0, 0.1), "the device was busy"
    assert times.ms(Kind.SHARED, 8) == 0
    for idle in (1.0, 1.2, 50.0):
        assert times.ms(Kind.SHARED, 8) == 0, "a few may be accidents"
        assert times.record(Kind.SHARED, 8, 3.0, idle)
    assert times.ms(Kind.SHARED, 8) == pytest.approx(4.2)
    # up to the next doubling of requests, and for no other kind
    assert times.ms(Kind.SHARED, 15) == pytest.approx(4.2)
    assert times.ms(Kind.SHARED, 16) == times.ms(Kind.UNIFORM, 8) == 0
    assert json.loads(json.dumps(times.snapshot())) == {"shared": {"8": 4.2}}


def test_a_busy_device_shows_only_that_the_host_takes_no_longer() -> None:
    """Were its steps to say that the host takes nothing, smaller graphs would look faster than the
    host is, and be tried again and again."""
    times = paced(Kind.SHARED, 8, 4.2)
    for _ in range(RECENT_STEPS):
        assert not times.record(Kind.SHARED, 8, 9.0, 0.1)
    assert times.ms(Kind.SHARED, 8) == 4.2
    # here it is faster than it was
    for _ in range(RECENT_STEPS):
        assert not times.record(Kind.SHARED, 8, 3.0, 0.1)
    assert times.ms(Kind.SHARED, 8) == pytest.approx(3.1)


def paced(kind: Kind, requests: int, ms: float) -> HostTimes:
    """Return the times after enough steps that took so long for the host."""
    times = HostTimes()
    for _ in range(ENOUGH_STEPS):
        assert times.record(kind, requests, ms / 2, ms / 2)
    return times


def test_a_step_that_nothing_followed_is_as_those_before_it() -> None:
    assert not HostTimes().record(Kind.PLAIN, 1, 3.0, None)
    times = paced(Kind.PLAIN, 1, 4.0)
    assert times.record(Kind.PLAIN, 1, 3.0, None)
    assert times.ms(Kind.PLAIN, 1) == 4.0
    times.record(Kind.PLAIN, 1, 5.0, 0.0)
    assert not times.record(Kind.PLAIN, 1, 3.0, None)


def test_what_was_learnt_of_a_kind_long_ago_is_tried_again() -> None:
    times = paced(Kind.SHARED, 4, 43.0)
    for _ in range(KEPT_STEPS):
        times.record(Kind.UNIFORM, 4, 3.0, 1.0)
    assert times.ms(Kind.SHARED, 4) == 43.0
    times.record(Kind.UNIFORM, 4, 3.0, 1.0)
    assert times.ms(Kind.SHARED, 4) == 0
    assert times.ms(Kind.UNIFORM, 4) == 4.0


def test_what_the_host_has_slowed_says_nothing_about_the_device() -> None:
    costs = large_model()
    before = costs.step_ms(8, 0)[BLOCK - 1]
    for _ in range(50):
        costs.record(8, BLOCK, 0, 1.5 * before, None, 20.0)
    assert json.loads(json.dumps(costs.snapshot()))["host_ms"] == {
        "uniform": {"8": round(1.5 * before + 20.0, 3)}
    }
    # no graph was corrected: at another load of the same graph the device's time holds
    graph = large_model()
    assert costs.step_ms(4, 0).tolist() == graph.step_ms(4, 0).tolist()
    assert costs.step_ms(8, 0)[0] == graph.step_ms(8, 0)[0]
    assert (costs.step_ms(8, 0)[1:] == 1.5 * before + 20.0).all()
