"""One point of benchmarks/load.py: what its requests ask, and the rate at which they decode."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import batch_load, load_windows
from benchmarks.load_windows import Lap, Stretch, Window
from sglang_dflash.testing.server import ServerProcess


@dataclass(frozen=True)
class RandomPrompts:
    """Prompts of one length, of random tokens, which never repeat."""

    length: int
    ids: tuple[int, int]  # the tokens to draw from

    @property
    def longest(self) -> int:
        return self.length

    @property
    def mean(self) -> float:
        return self.length

    def draw(self, count: int, number: int) -> list[list[int]]:
        """Return the prompts of a round."""
        return batch_load.draw_prompts(count, self.length, f"{number} {time.time()}", self.ids)


@dataclass(frozen=True)
class Questions:
    """Prompts of a task, as token ids."""

    prompts: list[list[int]]

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    @property
    def mean(self) -> float:
        return sum(map(len, self.prompts)) / len(self.prompts)

    def draw(self, count: int, number: int) -> list[list[int]]:
        """Return the prompts of a round: an odd one asks the same as the even one after it, so that
        two windows of rounds in turn can be compared."""
        first = (number - 1) // 2 * count
        return [self.prompts[(first + i) % len(self.prompts)] for i in range(count)]


class Text(NamedTuple):
    """What a profile of real questions asks: `gsm8k`, or `gsm8k@1.5` for another temperature than
    0."""

    task: str
    temperature: float = 0.0

    @classmethod
    def of(cls, profile: str | None) -> Text:
        task, _, temperature = (profile or "").partition("@")
        return cls(task, float(temperature or 0))

    @property
    def profile(self) -> str:
        return f"{self.task}@{self.temperature:g}" if self.temperature else self.task


def rids_of(profile: str | None, num_requests: int, number: int) -> list[str]:
    """Return the request ids of a round; the kinds of a mixture take turns."""
    parts = (profile or "plain").split("+")
    about = f"{profile}-{num_requests}-{number}"
    return [f"{parts[i % len(parts)]}-{about}-{i}" for i in range(num_requests)]


def measure(
    server: ServerProcess,
    profile: str | None,
    num_requests: int,
    room: int,
    prompts: RandomPrompts | Questions,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the rate of one point, from two windows of rounds in turn."""
    first, last = load_windows.tokens_between(room, options.from_tokens, options.to_tokens)

    def run_round(number: int, is_enough: Callable[[list[Lap]], bool]) -> list[Lap]:
        server.flush_cache()
        asked = prompts.draw(num_requests, number)
        rids = rids_of(profile, num_requests, number)
        return load_windows.run_round(
            server, asked, rids, room, is_enough, temperature=Text.of(profile).temperature
        )

    def is_over(laps: list[Lap]) -> bool:
        return load_windows.has_reached(laps, num_requests, last)

    def is_warm(laps: list[Lap]) -> bool:
        steady = load_windows.steady(laps, num_requests)
        seconds = load_windows.seconds_of(laps[i] for i in steady)
        return is_over(laps) or seconds >= options.warm_seconds

    run_round(0, is_warm)
    before = width_state(server)
    shares: tuple[list[Stretch], list[Stretch]] = ([], [])
    for number in range(1, options.rounds + 1):
        stretch = load_windows.stretch_of(
            run_round(number, is_over), num_requests, first=first, last=last
        )
        if stretch is None:
            raise RuntimeError(
                f"{num_requests} requests of {profile} ended before a steady step was logged. "
                "Raise --to-tokens, or the server's --mem-fraction-static."
            )
        shares[number % 2].append(stretch)
        if number % 2 == 0 and min(map(load_windows.seconds_of, shares)) >= options.seconds:
            break
    windows = [Window.of(share, prompts.mean) for share in shares if share]
    spread = load_windows.spread_of(windows)
    mean = {
        name: round(sum(getattr(window, name) for window in windows) / len(windows), 3)
        for name in ("tokens_per_s", "step_ms", "accept_length", "context")
    }
    is_cut = any(stretch.is_cut for share in shares for stretch in share)
    return {
        "profile": profile,
        "requests": num_requests,
        **mean,
        "tokens": [first, last],
        "short": is_cut or last < options.to_tokens,
        "spread": None if spread is None else round(spread, 4),
        "graph": all(window.graph for window in windows),
        "windows": [window._asdict() for window in windows],
        "width": width_since(before, width_state(server)),
    }


def width_state(server: ServerProcess) -> dict[str, Any] | None:
    """Return what our worker reports about its widths; None if it does not, or another serves."""
    return server.info()["internal_states"][0].get("sglang_dflash", {}).get("width")


def width_since(before: dict[str, Any] | None, after: dict[str, Any] | None) -> Any:
    """Return the later report with its steps counted since the earlier one: those per width, and
    those whose rows the requests shared."""
    steps = (after or {}).get("steps_by_width")
    if after is None or not isinstance(steps, dict):
        return after
    before = before or {}
    earlier = before.get("steps_by_width", {})
    since = {width: count - earlier.get(width, 0) for width, count in steps.items()}
    found = {**after, "steps_by_width": {width: count for width, count in since.items() if count}}
    if shared := after.get("shared"):
        steps_before = (before.get("shared") or {}).get("steps", 0)
        found["shared"] = {**shared, "steps": shared["steps"] - steps_before}
    return found
