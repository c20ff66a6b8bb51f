"""benchmarks/load_windows.py: laps in a log, stretches of them, and the rates of windows."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from benchmarks import load_windows
from benchmarks.load_windows import Lap, Stretch, Window

PLAIN_LINE = (
    "[2026-01-01 00:00:00] Decode batch, #running-req: 4, #full token: 128, token usage: 0.01, "
    "cuda graph: True, gen throughput (token/s): 200.00, #queue-req: 0\n"
)
OUR_LINE = (
    "[2026-01-01 00:00:00] Decode batch, #running-req: 2, #token: 8, token usage: 0.01, accept "
    "len: 2.50, accept rate: 0.10, cpu graph: False, gen throughput (token/s): 40.00, #queue-req: 0"
)


def laps(*rates: float, running: int = 2, accept_length: float = 1.0) -> list[Lap]:
    """Return laps of four steps: with two requests in plain decoding, of 8 tokens."""
    return [Lap(running, rate, accept_length, True) for rate in rates]


def test_laps_are_read_from_the_schedulers_lines() -> None:
    found = load_windows.laps_in(f"Prefill batch, #running-req: 4\n{PLAIN_LINE}{OUR_LINE}")
    assert found == [Lap(4, 200.0, 1.0, True), Lap(2, 40.0, 2.5, False)]
    # four steps of four requests, and of two with 2.5 tokens each
    assert [lap.seconds for lap in found] == [16 / 200, 20 / 40]


def test_a_lap_that_may_hold_prefill_is_left_out() -> None:
    ramp = laps(1.0, running=1) + laps(2.0, 8.0, 8.0)
    assert load_windows.steady(ramp, 2) == range(2, 4)
    assert load_windows.steady(ramp + laps(8.0, running=1) + laps(8.0), 2) == range(2, 4)
    assert not load_windows.steady(laps(1.0, running=1), 2)
    assert not load_windows.steady(ramp[:2], 2)


def test_progress_counts_the_tokens_of_all_requests() -> None:
    """Prefill's token; 2.5 of the first lap's steps, with one of two requests; 4 steps of both."""
    ramp = laps(1.0, running=1) + laps(1.0, accept_length=2.0)
    assert load_windows.progress(ramp, 2) == [1, 2.25, 10.25]
    assert load_windows.has_reached(ramp, 2, 10.25)
    assert not load_windows.has_reached(ramp, 2, 10.5)


@pytest.mark.parametrize("accept_length", [1.0, 2.5, 5.0])
def test_every_system_is_timed_over_the_same_tokens(accept_length: float) -> None:
    """By time, the faster one would be timed at longer contexts."""
    enough = laps(*[8.0] * 100, accept_length=accept_length)
    found = load_windows.stretch_of(enough, 2, 32, 160)
    assert found and not found.is_cut
    # laps are whole: half of one may be missing or too much on either side
    half = 2 * accept_length
    assert abs(found.begin - 32) <= half and abs(found.end - 160) <= half
    assert len(found.laps) == pytest.approx(128 / (4 * accept_length), abs=1)


def test_a_round_that_ends_early_is_cut() -> None:
    early = laps(*[8.0] * 20) + laps(8.0, running=1) + laps(*[8.0] * 50)
    found = load_windows.stretch_of(early, 2, 32, 160)
    # 1 + 2.5 + 4 * 19 tokens before a request ended
    assert found and found.is_cut and found.end == 79.5
    assert load_windows.stretch_of(early[:1], 2, 32, 160) is None
    # no lap's middle lies in between: the last steady one
    coarse = laps(8.0, 8.0, 8.0, accept_length=16.0)
    found = load_windows.stretch_of(coarse, 2, 20, 30)
    assert found == Stretch((coarse[2],), 105.0, 169.0, is_cut=False)


def test_a_small_pool_has_stretches_of_fewer_tokens() -> None:
    """Requests ahead of the mean must not end inside of one."""
    assert load_windows.tokens_between(320, 32, 160) == (32, 160)
    assert load_windows.tokens_between(5000, 32, 160) == (32, 160)
    assert load_windows.tokens_between(90, 32, 160) == (22, 45)


def test_a_round_is_all_tokens_over_all_seconds() -> None:
    """The mean of the laps' rates would count a short, fast lap like a long, slow one."""
    laps = (Lap(2, 10.0, 5.0, True), Lap(2, 40.0, 5.0, True), Lap(2, 40.0, 5.0, True))
    # 40 tokens in 4 s and twice in 1 s, 12 steps
    stretch = Stretch(laps, 30, 80, is_cut=False)
    assert (stretch.tokens_per_s, stretch.step_ms) == (20.0, 500.0)


def test_a_window_is_the_median_of_its_rounds() -> None:
    """Neighbours on the machine make some rounds far slower."""
    rounds = [
        Stretch((Lap(2, rate, 5.0, True),), 30, 50, is_cut=False) for rate in (42.0, 5.0, 40.0)
    ]
    assert Window.of(rounds, 0).tokens_per_s == 40.0
    assert Window.of(rounds, 0).step_ms == 250.0


def test_a_window_counts_all_laps() -> None:
    slow = Stretch((Lap(2, 10.0, 5.0, True),), 30, 50, is_cut=False)
    fast = Stretch((Lap(2, 40.0, 5.0, False), Lap(2, 40.0, 5.0, True)), 40, 80, is_cut=False)
    # contexts of 140 and twice 160
    assert Window.of([slow, fast], 100) == Window(
        *(25.0, 6.0),
        step_ms=625.0,
        fast_step_ms=250.0,
        accept_length=5.0,
        graph=False,
        context=153.3,
        rounds=2,
    )
    found = [Window.of([slow], 0), Window.of([fast], 0)]
    assert load_windows.spread_of(found) == 3.0
    assert load_windows.spread_of(found[:1]) is None


class Served:
    """A server whose log grows by one line per look."""

    def __init__(self, lines: list[str]) -> None:
        self._lines, self._looks = lines, 0

    def log(self) -> str:
        self._looks += 1
        return "".join(self._lines[: self._looks])


def test_waiting_ends_when_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_windows, "POLL_SECONDS", 0.0)
    served: Any = Served([PLAIN_LINE] * 3 + [PLAIN_LINE.replace("req: 4", "req: 3")] * 9)
    found = load_windows.wait_for_laps(served, 0, 4, Future(), lambda _: False)
    assert found == [Lap(4, 200.0, 1.0, True)] * 3 + [Lap(3, 200.0, 1.0, True)]


def test_waiting_ends_when_laps_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_windows, "POLL_SECONDS", 0.0)
    served: Any = Served([PLAIN_LINE] * 9)
    found = load_windows.wait_for_laps(served, 0, 4, Future(), lambda laps: len(laps) >= 5)
    assert len(found) == 5


def test_requests_that_never_run_together_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that cannot hold all would otherwise be measured with fewer."""
    monkeypatch.setattr(load_windows, "POLL_SECONDS", 0.0)
    served: Any = Served([PLAIN_LINE] * 200)
    with pytest.raises(RuntimeError, match="5 requests never decoded together: 4 did at most"):
        load_windows.wait_for_laps(served, 0, 5, Future(), lambda _: False)


def info(tokens: int, sliding: int | None = None, longest: int = 10_000) -> dict[str, Any]:
    usage = {"token_capacity": tokens, "token_capacity_swa": sliding}
    return {"max_req_input_len": longest, "internal_states": [{"memory_usage": usage}]}


def test_new_tokens_fit_into_the_pool() -> None:
    assert load_windows.room_for(info(70_000), 1, 128, 2048) == 2048
    assert load_windows.room_for(info(70_000), 256, 128, 2048) == 70_000 // 256 - 128 - 64
    assert load_windows.room_for(info(10**6, sliding=70_000), 100, 128, 2048) == 700 - 128 - 64
    assert load_windows.room_for(info(70_000, longest=400), 1, 128, 2048) == 400 - 128 - 64
    with pytest.raises(RuntimeError, match=r"256 .* need a pool of 57344 tokens.* holds 40000"):
        load_windows.room_for(info(40_000), 256, 128, 2048)
