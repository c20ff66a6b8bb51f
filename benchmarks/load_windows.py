"""Decode rates of a server under steady load, from the lines that its scheduler logs.

Every few decode steps SGLang logs how many requests run and how many tokens per second they made
since the line before, on the scheduler's own clock: a lap. No answer is streamed, so neither HTTP
nor a slow client is measured. Requests start together and are aborted after the measurement. What
is measured of such a round is a stretch of its laps, given by the tokens that each request has
generated: at the same time, a faster system would have longer contexts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple

import requests

from benchmarks.systems import TOKENS_AHEAD
from sglang_dflash.testing.server import ServerProcess

STEPS_PER_LAP = 4
# of these, on average in a round's first lap: it began with the last steps of the round before
FIRST_LAP_STEPS = (STEPS_PER_LAP + 1) / 2
# most tokens of a request over the mean at the end of the stretch: of accept lengths 2 and 8, half
# of the requests each, the faster half has 1.6 times the mean, some of them more, and the last lap
# may end a little later
AHEAD = 2
LOG_ARGS = ("--decode-log-interval", str(STEPS_PER_LAP))
FEWEST_NEW_TOKENS = 32
MOST_SECONDS = 240.0  # of a round, with the first use of kernels
MOST_LAPS = 100  # with fewer requests running, as in a server that cannot hold all
POLL_SECONDS = 0.05

LINE = re.compile(
    r"Decode batch.*?#running-req: (\d+),(?:.*?accept len: ([\d.]+))?"
    r".*?: (True|False), gen throughput \(token/s\): ([\d.]+)"
)


class Lap(NamedTuple):
    """A few decode steps."""

    running: int
    tokens_per_s: float
    accept_length: float
    graph: bool  # whether the last step replayed a CUDA graph

    @property
    def tokens(self) -> float:
        return STEPS_PER_LAP * self.running * self.accept_length

    @property
    def seconds(self) -> float:
        return self.tokens / self.tokens_per_s


def laps_in(log: str) -> list[Lap]:
    return [
        Lap(int(running), float(rate), float(accept_length or 1), graph == "True")
        for running, accept_length, graph, rate in LINE.findall(log)
        if float(rate) > 0
    ]


class Stretch(NamedTuple):
    """The measured laps of a round: consecutive, with all requests running."""

    laps: tuple[Lap, ...]
    begin: float  # tokens that each request had generated, on average
    end: float
    is_cut: bool  # whether requests ended before it was complete

    @property
    def seconds(self) -> float:
        return seconds_of(self.laps)

    @property
    def tokens_per_s(self) -> float:
        return sum(lap.tokens for lap in self.laps) / self.seconds

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / STEPS_PER_LAP / len(self.laps)


def seconds_of(parts: Iterable[Lap | Stretch]) -> float:
    return sum(part.seconds for part in parts)


class Window(NamedTuple):
    """The stretches of some rounds."""

    # the median of the rounds, as that of the step: on a shared host some rounds are far slower
    tokens_per_s: float
    seconds: float
    step_ms: float
    fast_step_ms: float  # the first quartile of the laps
    accept_length: float
    graph: bool
    context: float  # tokens of a request, on average over the steps
    rounds: int

    @classmethod
    def of(cls, stretches: Sequence[Stretch], prompt: float) -> Window:
        laps = [lap for stretch in stretches for lap in stretch.laps]
        tokens, steps = sum(lap.tokens for lap in laps), STEPS_PER_LAP * len(laps)
        step_ms = sorted(1000 * lap.seconds / STEPS_PER_LAP for lap in laps)
        middles = [len(each.laps) * (each.begin + each.end) / 2 for each in stretches]
        return cls(
            tokens_per_s=round(median(each.tokens_per_s for each in stretches), 2),
            seconds=round(seconds_of(laps), 2),
            step_ms=round(median(each.step_ms for each in stretches), 3),
            fast_step_ms=round(step_ms[len(step_ms) // 4], 3),
            accept_length=round(tokens / steps / laps[0].running, 3),
            graph=all(lap.graph for lap in laps),
            context=round(prompt + sum(middles) / len(laps), 1),
            rounds=len(stretches),
        )


def steady(laps: Sequence[Lap], num_requests: int) -> range:
    """Return the places of the laps with all requests running.

    The first such lap is left out: it may have begun before the last prefill.
    """
    first = next((i for i, lap in enumerate(laps) if lap.running == num_requests), len(laps)) + 1
    end = first
    while end < len(laps) and laps[end].running == num_requests:
        end += 1
    return range(first, end)


def progress(laps: Sequence[Lap], num_requests: int) -> list[float]:
    """Return the tokens that each request has generated, on average, before a round's first lap
    and after each. Prefill made the first token."""
    found = [1.0]
    for lap in laps:
        steps = FIRST_LAP_STEPS if len(found) == 1 else STEPS_PER_LAP
        found.append(found[-1] + lap.tokens / num_requests * steps / STEPS_PER_LAP)
    return found


def has_reached(laps: Sequence[Lap], num_requests: int, tokens: float) -> bool:
    return progress(laps, num_requests)[-1] >= tokens


def stretch_of(laps: Sequence[Lap], num_requests: int, first: float, last: float) -> Stretch | None:
    """Return the steady laps of a round whose middle lies between these tokens of a request; if
    there is none, the last steady lap, and None without one."""
    places, tokens = steady(laps, num_requests), progress(laps, num_requests)
    inside = [i for i in places if first <= (tokens[i] + tokens[i + 1]) / 2 < last]
    inside = inside or list(places[-1:])
    if not inside:
        return None
    begin, end = inside[0], inside[-1] + 1
    is_cut = tokens[places.stop] < last
    return Stretch(tuple(laps[begin:end]), tokens[begin], tokens[end], is_cut)


def tokens_between(room: int, first: int, last: int) -> tuple[int, int]:
    """Return the tokens at which a stretch begins and ends: as asked, or fewer if requests that are
    ahead of the others would end before."""
    last = min(last, room // AHEAD)
    return min(first, last // 2), last


def spread_of(windows: Sequence[Window]) -> float | None:
    """Return the difference between the fastest and the slowest window, relative to the latter;
    None for a single one."""
    rates = [window.tokens_per_s for window in windows]
    return max(rates) / min(rates) - 1 if len(rates) > 1 else None


def room_for(info: dict[str, Any], num_requests: int, prompt: int, wanted: int) -> int:
    """Return how many new tokens each request may have, so that the server admits all at once."""
    usage = info["internal_states"][0]["memory_usage"]
    pools = [usage["token_capacity"], usage.get("token_capacity_swa")]
    capacity = min(size for size in pools if size)
    longest = min(capacity // num_requests, info.get("max_req_input_len") or capacity)
    room = min(longest - prompt - TOKENS_AHEAD, wanted)
    if room < FEWEST_NEW_TOKENS:
        raise RuntimeError(
            f"{num_requests} requests with prompts of {prompt} tokens need a pool of "
            f"{num_requests * (prompt + TOKENS_AHEAD + FEWEST_NEW_TOKENS)} tokens, but this server "
            f"holds {capacity}. Pass a larger --mem-fraction-static, or --swa-full-tokens-ratio 1."
        )
    return room


def run_round(
    server: ServerProcess,
    prompts: list[list[int]],
    rids: list[str],
    new_tokens: int,
    is_enough: Callable[[list[Lap]], bool],
    *,
    temperature: float = 0.0,
) -> list[Lap]:
    """Decode all prompts together; return the laps once they are enough, or the requests have begun
    to end."""
    params = {"temperature": temperature, "max_new_tokens": new_tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": prompts, "rid": rids, "sampling_params": params}
    before = len(server.log())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=600)
        try:
            return wait_for_laps(server, before, len(prompts), answer, is_enough)
        finally:
            everything = {"abort_all": True}
            requests.post(f"{server.url}/abort_request", json=everything, timeout=60)


def wait_for_laps(
    server: ServerProcess,
    before: int,
    num_requests: int,
    answer: Future[Any],
    is_enough: Callable[[list[Lap]], bool],
) -> list[Lap]:
    deadline = time.monotonic() + MOST_SECONDS
    while True:
        is_done = answer.done() or time.monotonic() > deadline
        laps = laps_in(server.log()[before:])
        found = steady(laps, num_requests)
        ended = found.stop < len(laps)
        if ended or (found and (is_done or is_enough(laps))):
            return laps
        if is_done or (not found and len(laps) > MOST_LAPS):
            break
        time.sleep(POLL_SECONDS)
    most = max((lap.running for lap in laps), default=0)
    replied = answer.result().text[:500] if answer.done() else "nothing"
    raise RuntimeError(
        f"{num_requests} requests never decoded together: {most} did at most, and the server "
        f"answered {replied!r}. Its log may name retractions or too few request slots."
    )
