"""Ranks notice that another has ended or stopped, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from sglang_dflash import heartbeat
from sglang_dflash.heartbeat import Heartbeat, reachable_host

# threads of a busy machine are that late at times
PATIENCE_S = 1.5


class Ranks:
    """Ranks in one process, and what they say."""

    def __init__(self, count: int, patience_s: float) -> None:
        self.beats = [Heartbeat(i, count, "127.0.0.1", patience_s) for i in range(count)]
        self.said: list[tuple[int, str]] = []

    def start(self, *ranks: int) -> None:
        places = [each.place for each in self.beats]
        for rank in ranks:
            self.beats[rank].start(
                places, end=lambda text, rank=rank: self.said.append((rank, text))
            )

    def start_all(self) -> None:
        """Start all ranks, and wait until each has heard the others: only then is one missed."""
        self.start(*range(len(self.beats)))
        peers = [peer for each in self.beats for peer in each._peers.values()]
        deadline = time.monotonic() + 20
        while not all(peer.was_heard for peer in peers):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.said) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    def assert_both_say(self, found: str) -> None:
        """Wait for ranks 0 and 2 to name rank 1; `found` has a place for who says so."""
        self.wait_for(2)
        assert sorted(rank for rank, _ in self.said) == [0, 2]
        for rank, text in self.said:
            assert text.startswith("Rank 1 of this server (process ")
            assert found.format(rank) in text


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "AGAIN_S", 0.02)
    ranks = Ranks(3, PATIENCE_S)
    yield ranks
    for each in ranks.beats:
        each.stop()


def test_ranks_that_answer_are_left_alone(three: Ranks) -> None:
    three.start(0, 1, 2)
    time.sleep(2 * PATIENCE_S)
    assert three.said == []


def test_a_rank_that_stops_is_named_by_all_others(
    three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its ports, and says nothing."""
    silent = threading.Event()
    exchange = Heartbeat._exchange

    def stopped(self: Heartbeat, peer: heartbeat.Peer) -> None:
        if self.rank != 1 or not silent.is_set():
            exchange(self, peer)

    monkeypatch.setattr(Heartbeat, "_exchange", stopped)
    three.start_all()
    assert three.said == []
    silent.set()
    three.assert_both_say("has not answered rank {} for 1.5 s")


def test_a_rank_that_ends_is_named_at_once(three: Ranks) -> None:
    for each in three.beats:
        each.patience_s = 60
    three.start_all()
    three.beats[2].stop()
    began = time.monotonic()
    three.wait_for(2)
    assert time.monotonic() - began < 10
    assert sorted(rank for rank, _ in three.said) == [0, 1]
    assert all(text.startswith("Rank 2 of this server") for _, text in three.said)
    assert all("has ended, and rank" in text for _, text in three.said)


def test_a_rank_that_answers_but_does_not_take_part_is_named(three: Ranks) -> None:
    """The others have begun a step and wait; all had begun the one before."""
    three.start_all()
    for each in three.beats:
        each.begin_step()
    time.sleep(0.3)
    three.beats[0].begin_step()
    three.beats[2].begin_step()
    three.assert_both_say("has not begun step 2 after 2.25 s. Rank {} waits for it")


def test_a_rank_that_is_slower_than_others_is_not_named(three: Ranks) -> None:
    """It is a step behind at most times, but goes on."""
    three.start(0, 1, 2)
    for _ in range(12):
        three.beats[0].begin_step()
        three.beats[2].begin_step()
        time.sleep(0.1)
        three.beats[1].begin_step()
    assert three.said == []


def test_a_rank_that_has_not_begun_is_waited_for(three: Ranks) -> None:
    """It may load its weights for longer than the others."""
    three.start(0, 2)
    time.sleep(2 * PATIENCE_S)
    assert three.said == []
    three.start(1)
    time.sleep(1.5 * PATIENCE_S)
    assert three.said == []


def test_a_failure_waits_for_its_explanation(three: Ranks) -> None:
    three.start_all()
    three.beats[1].stop()
    three.beats[0].explain(wait_s=10)
    assert 0 in [rank for rank, _ in three.said]


@pytest.mark.parametrize("other", [None, "127.0.0.1:25000", "no such host:25000", "nonsense"])
def test_the_address_is_the_one_that_leads_to_the_other_machine(other: str | None) -> None:
    assert reachable_host(other) == "127.0.0.1"
