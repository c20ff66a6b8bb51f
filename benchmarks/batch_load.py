"""Generate load on a server and measure its decode rate."""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import requests

from benchmarks.result_files import AGREEMENT
from benchmarks.systems import read_config
from sglang_dflash.testing.server import ServerProcess

SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
}
PORT = 30000  # the recipes' default
PROMPT_IDS = (1000, 50000)
WARM_UP_TOKENS = 8
SECONDS_PER_RATE = 2.0  # total time of the longer batches over all tries


def generate(url: str, ids: list[int], new_tokens: int, sampling: str) -> dict[str, Any]:
    params = {**SAMPLING[sampling], "max_new_tokens": new_tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": params}
    response = requests.post(f"{url}/generate", json=body, timeout=600)
    response.raise_for_status()
    return response.json()


def prompt_ids(model_path: Path | str) -> tuple[int, int]:
    """Return the range of token ids to draw prompts from, inside the model's vocabulary."""
    low, high = PROMPT_IDS
    config = read_config(model_path)
    vocabulary = config.get("text_config", config).get("vocab_size", high)
    return min(low, vocabulary // 2), min(high, vocabulary)


def draw_prompts(
    num_requests: int, context: int, seed: object, ids: tuple[int, int] = PROMPT_IDS
) -> list[list[int]]:
    chance = random.Random(f"{seed} {num_requests} {context}")
    return [[chance.randrange(*ids) for _ in range(context)] for _ in range(num_requests)]


def run_batch(
    url: str, prompts: list[list[int]], new_tokens: int, sampling: str
) -> tuple[float, list[dict[str, Any]]]:
    """Send a batch concurrently; return its duration and answers."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.monotonic()
        answers = list(pool.map(lambda ids: generate(url, ids, new_tokens, sampling), prompts))
        return time.monotonic() - start, answers


def ran_together(log: str) -> int:
    """Return how many requests a server ran concurrently, by its log; 0 if any was retracted."""
    if "Retract requests" in log:
        return 0
    running = [int(n) for n in re.findall(r"Decode batch.* #running-req: (\d+)", log)]
    joining = re.findall(r"Prefill batch, #new-seq: (\d+).* #running-req: (\d+)", log)
    return max(running + [int(new) + int(before) for new, before in joining], default=0)


class Rate(NamedTuple):
    tokens_per_s: float
    answers: list[dict[str, Any]]  # of the first longer batch; the same prompts for every system
    together: int  # requests that ran concurrently in the batches behind the rate
    spread: float | None  # see spread_of

    def numbers(self) -> dict[str, Any]:
        """Return the fields that a result file stores."""
        return {
            "together": self.together,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "spread": None if self.spread is None else round(self.spread, 4),
        }


def spread_of(short: list[float], long: list[float]) -> float | None:
    """Return the difference between the rates of the fastest and the second-fastest batches, as
    a fraction of the lower; None after a single try."""
    if len(long) < 2:
        return None
    taken = [b - a for a, b in zip(sorted(short)[:2], sorted(long)[:2], strict=True)]
    return (max(taken) - min(taken)) / max(min(taken), 1e-6)


def add_requests_option(
    parser: argparse.ArgumentParser,
    default: Sequence[int] = (1, 8, 32),
    *,
    name: str = "--requests",
) -> None:
    told = " ".join(map(str, default))
    parser.add_argument(
        name,
        nargs="+",
        type=int,
        default=list(default),
        help=f"concurrent requests; default: {told}",
    )


def add_port_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        help="port of a server that runs alone; default: %(default)s",
    )


def add_budget_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget-s",
        type=float,
        default=0.0,
        help="seconds after which no point is started; default: 0, no limit",
    )


def add_load_options(parser: argparse.ArgumentParser, *, lengths: tuple[int, int]) -> None:
    """Add the options of a load: how many requests, their lengths, and where they are sent."""
    add_requests_option(parser)
    parser.add_argument(
        "--lengths",
        nargs=2,
        type=int,
        default=list(lengths),
        help="the two output lengths, in tokens; default: {} {}".format(*lengths),
    )
    parser.add_argument(
        "--tries",
        nargs=2,
        type=int,
        default=[2, 6],
        metavar=("FEWEST", "MOST"),
        # argparse %-formats help texts: %% is a percent sign
        help=f"runs per length; stops once the two fastest agree within {AGREEMENT:.0%}%; "
        "default: 2 6",
    )
    add_port_option(parser)


def check_load_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name, least in (("lengths", 2), ("tries", 1)):
        low, high = getattr(options, name)
        if low < least or high < low or (name == "lengths" and high == low):
            parser.error(
                f"--{name} {low} {high}: pass two ascending numbers, each at least {least}"
            )


def decode_rate(
    server: ServerProcess,
    num_requests: int,
    context: int,
    sampling: str = "greedy",
    *,
    lengths: Iterable[int],
    tries: Iterable[int] = (2, 6),
    ids: tuple[int, int] = PROMPT_IDS,
) -> Rate:
    """Measure decoded tokens per second.

    The rate comes from the difference between two output lengths, with the fastest try of each, so
    that prefill and start-up cancel out. A warm-up batch absorbs first-use compilation, which in
    the shorter batch would inflate the rate. `tries` is the minimum and the maximum; in between,
    measuring stops once the longer batches have taken SECONDS_PER_RATE and the fastest two agree.
    """
    short, long = lengths
    fewest, most = tries
    first = draw_prompts(num_requests, context, "first", ids)
    run_batch(server.url, first, WARM_UP_TOKENS, sampling)
    seconds: dict[int, list[float]] = {short: [], long: []}
    together: dict[int, list[int]] = {short: [], long: []}
    answers: list[dict[str, Any]] = []
    spread = None
    for number in range(most):
        for length in (short, long):
            prompts = draw_prompts(num_requests, context, f"{number} {length}", ids)
            before = len(server.log())
            taken, answered = run_batch(server.url, prompts, length, sampling)
            if (number, length) == (0, long):
                answers = answered
            seconds[length].append(taken)
            together[length].append(min(ran_together(server.log()[before:]), num_requests))
        spread = spread_of(seconds[short], seconds[long])
        agreed = spread is not None and spread <= AGREEMENT
        if number + 1 >= fewest and agreed and sum(seconds[long]) >= SECONDS_PER_RATE:
            break
    best = {length: min(zip(seconds[length], together[length], strict=True)) for length in seconds}
    taken = best[long][0] - best[short][0]
    if taken <= 0:
        raise RuntimeError(
            f"{num_requests} requests of {context}: {long} tokens took {best[long][0]:.3f} s and "
            f"{short} took {best[short][0]:.3f} s. Something else is loading the machine: use "
            "lengths that are further apart, or more tries."
        )
    rate = num_requests * (long - short) / taken
    return Rate(rate, answers, min(best[long][1], best[short][1]), spread)
