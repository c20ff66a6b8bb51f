"""Decode rates of a server under steady load, from the lines that its scheduler logs.

Every few decode steps SGLang logs how many requests run and how many tokens per second they made
since the line before, on the scheduler's own clock: a lap. No answer is streamed, so neither HTTP
nor a slow client is measured. Requests start together and are aborted after the measurement.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import requests

from sglang_dflash.testing.server import ServerProcess

STEPS_PER_LAP = 4
LOG_ARGS = ("--decode-log-interval", str(STEPS_PER_LAP))
TOKENS_AHEAD = 64  # slots that a request reserves for upcoming blocks
FEWEST_NEW_TOKENS = 32
MOST_SECONDS = 240.0  # of a round, with the first use of kernels
MOST_LAPS = 100  # with fewer requests running, as in a server that cannot hold all
POLL_SECONDS = 0.2

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


class Window(NamedTuple):
    """Consecutive laps with all requests running."""

    tokens_per_s: float
    seconds: float
    step_ms: float
    accept_length: float
    graph: bool

    @classmethod
    def of(cls, laps: Sequence[Lap]) -> Window:
        tokens, seconds = sum(lap.tokens for lap in laps), sum(lap.seconds for lap in laps)
        steps = STEPS_PER_LAP * len(laps)
        return cls(
            tokens_per_s=round(tokens / seconds, 2),
            seconds=round(seconds, 2),
            step_ms=round(1000 * seconds / steps, 3),
            accept_length=round(tokens / steps / laps[0].running, 3),
            graph=all(lap.graph for lap in laps),
        )


def steady(laps: Sequence[Lap], num_requests: int) -> tuple[list[Lap], bool]:
    """Return the laps with all requests running, and whether they have ended.

    The first such lap is left out: it may have begun before the last prefill.
    """
    first = next((i for i, lap in enumerate(laps) if lap.running == num_requests), len(laps))
    found: list[Lap] = []
    for lap in laps[first + 1 :]:
        if lap.running != num_requests:
            return found, True
        found.append(lap)
    return found, False


def windows_of(laps: Sequence[Lap], *, warmup: float, seconds: float) -> list[Window]:
    """Cut steady laps into windows of `seconds` after a warm-up.

    If they are too short for one window, what follows the warm-up is the only one, and the warm-up
    takes at most half of them.
    """
    total = sum(lap.seconds for lap in laps)
    skip = warmup if total >= warmup + seconds else min(warmup, total / 2)
    windows: list[Window] = []
    current: list[Lap] = []
    elapsed = 0.0
    for lap in laps:
        began, elapsed = elapsed, elapsed + lap.seconds
        if began < skip:
            continue
        current.append(lap)
        if sum(each.seconds for each in current) >= seconds:
            windows.append(Window.of(current))
            current = []
    return windows or ([Window.of(current)] if current else [])


def are_enough(laps: Sequence[Lap], wanted: int, *, warmup: float, seconds: float) -> bool:
    """Return whether steady laps hold so many full windows."""
    windows = windows_of(laps, warmup=warmup, seconds=seconds)
    is_long = sum(lap.seconds for lap in laps) >= warmup + wanted * seconds
    return is_long and sum(window.seconds >= seconds for window in windows) >= wanted


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
) -> list[Lap]:
    """Decode all prompts together; return the steady laps once they are enough, or the requests
    have begun to end."""
    params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
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
        found, ended = steady(laps, num_requests)
        if ended or is_enough(found) or (is_done and found):
            return found
        if is_done or (not found and len(laps) > MOST_LAPS):
            break
        time.sleep(POLL_SECONDS)
    most = max((lap.running for lap in laps), default=0)
    replied = answer.result().text[:500] if answer.done() else "nothing"
    raise RuntimeError(
        f"{num_requests} requests never decoded together: {most} did at most, and the server "
        f"answered {replied!r}. Its log may name retractions or too few request slots."
    )
