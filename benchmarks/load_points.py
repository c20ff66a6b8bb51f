"""One point of benchmarks/load.py: what its requests ask, and the rate at which they decode."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import requests

from benchmarks import batch_load, load_windows
from benchmarks.load_windows import Lap, Stretch, Window
from sglang_dflash.testing.server import ServerProcess

System = TypeVar("System")

# relative difference of two windows up to which no more rounds are run: less than what tables mark
CLOSE = 0.03
# rounds of systems that take turns: from five pairs on, ratios have intervals (paired.py)
FEWEST_IN_TURN = 6


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


class Point:
    """A system at one point: its rounds so far, shared out to two windows in turn."""

    def __init__(
        self,
        server: ServerProcess,
        profile: str | None,
        num_requests: int,
        room: int,
        prompts: RandomPrompts | Questions,
        options: argparse.Namespace,
    ) -> None:
        self._server, self._prompts, self._options = server, prompts, options
        self._profile, self._requests, self._room = profile, num_requests, room
        self._first, self._last = load_windows.tokens_between(
            room, options.from_tokens, options.to_tokens
        )
        self._shares: tuple[list[Stretch], list[Stretch]] = ([], [])
        # of each round, in their order
        self._rates: list[float] = []
        self._before: dict[str, Any] | None = None

    @property
    def is_known(self) -> bool:
        """Whether both windows are long enough, and agree."""
        if min(map(load_windows.seconds_of, self._shares)) < self._options.seconds:
            return False
        spread = load_windows.spread_of(self._windows())
        return spread is not None and spread <= CLOSE

    def warm_up(self) -> None:
        """Run a round that is not timed."""

        def is_warm(laps: list[Lap]) -> bool:
            steady = load_windows.steady(laps, self._requests)
            seconds = load_windows.seconds_of(laps[i] for i in steady)
            return self._is_over(laps) or seconds >= self._options.warm_seconds

        self._run_round(0, is_warm)
        self._before = width_state(self._server)

    def run(self, number: int) -> None:
        """Run a timed round, numbered from 1."""
        laps = self._run_round(number, self._is_over)
        stretch = load_windows.stretch_of(laps, self._requests, first=self._first, last=self._last)
        if stretch is None:
            raise RuntimeError(
                f"{self._requests} requests of {self._profile} ended before a steady step was "
                "logged. Raise --to-tokens, or the server's --mem-fraction-static."
            )
        self._shares[number % 2].append(stretch)
        self._rates.append(round(stretch.tokens_per_s, 2))

    def result(self) -> dict[str, Any]:
        windows = self._windows()
        spread = load_windows.spread_of(windows)
        mean = {
            name: round(sum(getattr(window, name) for window in windows) / len(windows), 3)
            for name in ("tokens_per_s", "step_ms", "fast_step_ms", "accept_length", "context")
        }
        is_cut = any(stretch.is_cut for share in self._shares for stretch in share)
        return {
            "profile": self._profile,
            "requests": self._requests,
            **mean,
            "tokens": [self._first, self._last],
            "short": is_cut or self._last < self._options.to_tokens,
            "spread": None if spread is None else round(spread, 4),
            "graph": all(window.graph for window in windows),
            "windows": [window._asdict() for window in windows],
            "rounds": self._rates,
            "width": width_since(self._before, width_state(self._server)),
        }

    def _windows(self) -> list[Window]:
        return [Window.of(share, self._prompts.mean) for share in self._shares if share]

    def _is_over(self, laps: list[Lap]) -> bool:
        return load_windows.has_reached(laps, self._requests, self._last)

    def _run_round(self, number: int, is_enough: Callable[[list[Lap]], bool]) -> list[Lap]:
        self._server.flush_cache()
        return load_windows.run_round(
            self._server,
            self._prompts.draw(self._requests, number),
            rids_of(self._profile, self._requests, number),
            self._room,
            is_enough,
            temperature=Text.of(self._profile).temperature,
        )


def measure_in_turn(
    points: Mapping[System, Point],
    rounds: int,
    take_turn: Callable[[System], None] = lambda _: None,
) -> dict[System, dict[str, Any] | Exception]:
    """Return the result of each system's point, or why there is none, by rounds that the systems
    take in turn, after `take_turn`; they end once all points are known, and their ratios have
    intervals. When they began tells later which points were measured together."""
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    failed: dict[System, Exception] = {}
    for number in range(rounds + 1):
        running = {system: point for system, point in points.items() if system not in failed}
        for system, point in running.items():
            take_turn(system)
            try:
                if number == 0:
                    point.warm_up()
                else:
                    point.run(number)
            except (RuntimeError, requests.RequestException) as error:
                failed[system] = error
        # two windows have as many rounds
        is_even = number > 0 and number % 2 == 0
        may_end = is_even and (len(points) == 1 or number >= FEWEST_IN_TURN)
        if may_end and all(running[system].is_known for system in running.keys() - failed.keys()):
            break
    return {
        system: failed[system] if system in failed else {**point.result(), "began": began}
        for system, point in points.items()
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
