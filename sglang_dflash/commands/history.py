"""What servers have reported lately: rates between polls, by replica and in sum."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from urllib.parse import urlsplit

from sglang_dflash.commands.ask import Answer, NoReport, ask

POLLS = 300  # kept
WINDOW_S = 60.0  # of what is shown by position
ALL = "all replicas"
STAGES = ("draft", "verify", "commit")


@dataclass(frozen=True)
class Counts:
    """Counters of a replica since it started, or of several."""

    steps: int = 0  # verify steps of requests
    committed: int = 0
    rows: int = 0
    histogram: Sequence[int] = ()  # [k]: steps that committed k + 1 tokens
    accepted_at: Sequence[int] = ()  # [k]: steps in which draft k + 1 was accepted
    timed_steps: int = 0  # steps of the batch
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage

    @classmethod
    def of(cls, ours: Mapping[str, Any]) -> Counts:
        """Read a replica's state."""
        acceptance = ours["acceptance"]
        # a server of an earlier version reports no stages
        stages = ours.get("stages", {"steps": 0, "seconds": {}})
        return cls(
            steps=acceptance["verify_steps"],
            committed=acceptance["committed_tokens"],
            rows=sum(width * steps for width, steps in enumerate(acceptance["at_width"], start=1)),
            histogram=acceptance["histogram"],
            accepted_at=acceptance["accepted_at"],
            timed_steps=stages["steps"],
            seconds=stages["seconds"],
        )

    def since(self, earlier: Counts) -> Counts:
        """Return what was added since; all of it if the server has started anew."""
        if self.steps < earlier.steps:
            return self
        return self._with(earlier, lambda now, then: now - then)

    def plus(self, other: Counts) -> Counts:
        """Add the counters of another replica, whose block size may differ."""
        return self._with(other, lambda one, two: one + two)

    def _with(self, other: Counts, combine: Callable[[Any, Any], Any]) -> Counts:
        def lists(one: Sequence[int], two: Sequence[int]) -> list[int]:
            return [combine(*pair) for pair in zip_longest(one, two, fillvalue=0)]

        return Counts(
            steps=combine(self.steps, other.steps),
            committed=combine(self.committed, other.committed),
            rows=combine(self.rows, other.rows),
            histogram=lists(self.histogram, other.histogram),
            accepted_at=lists(self.accepted_at, other.accepted_at),
            timed_steps=combine(self.timed_steps, other.timed_steps),
            seconds={
                stage: combine(self.seconds.get(stage, 0.0), other.seconds.get(stage, 0.0))
                for stage in {*self.seconds, *other.seconds}
            },
        )

    def rates(self, seconds: float) -> dict[str, float | None]:
        """Return what these counts are by step and by second; None where nothing was counted."""
        found: dict[str, float | None] = {
            "tokens_per_s": round(self.committed / seconds, 2),
            "accept_length": _ratio(self.committed, self.steps),
            "width": _ratio(self.rows, self.steps),
        }
        for stage in STAGES:
            ms = 1000 * self.seconds.get(stage, 0.0)
            found[f"{stage}_ms"] = _ratio(ms, self.timed_steps)
        return found


def _ratio(count: float, of: int) -> float | None:
    return round(count / of, 4) if of else None


@dataclass(frozen=True)
class Replica:
    """A replica at one poll."""

    counts: Counts
    alarms: int
    free_kv_slots: int
    capacity: int | None  # KV slots, if the server says so
    block_size: int
    mode: str | None  # of the verify width
    survival: Sequence[float]

    @classmethod
    def of(cls, ours: Mapping[str, Any], info: Mapping[str, Any]) -> Replica:
        width = ours.get("width")
        return cls(
            counts=Counts.of(ours),
            alarms=ours["alarms"],
            free_kv_slots=ours["free_kv_slots"],
            capacity=info.get("max_total_num_tokens"),
            block_size=len(ours["acceptance"]["histogram"]),
            mode=None if width is None else str(width["mode"]),
            survival=[] if width is None else width["survival"],
        )


@dataclass(frozen=True)
class Poll:
    """Every replica that answered a poll, and the rates since the poll before."""

    at: float  # seconds since the epoch
    replicas: Mapping[str, Replica]
    numbers: Mapping[str, Mapping[str, float | None]]  # by replica, and of all


class History:
    """Polls of several servers, the latest ones kept."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        polls: int = POLLS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._urls = urls
        self._clock = clock
        self._polls: deque[Poll] = deque(maxlen=polls)
        self._servers: list[dict[str, Any]] = [
            {"url": url, "state": "asking", "message": f"Asking {url} ...", "answered_at": None}
            for url in urls
        ]

    def poll(self) -> None:
        """Ask every server, all at a time."""
        answers: dict[str, Answer | NoReport] = {}

        def look(url: str) -> None:
            try:
                answers[url] = ask(url)
            except NoReport as error:
                answers[url] = error

        # not a pool, whose threads would hold up Ctrl-C until the slowest server has answered
        threads = [threading.Thread(target=look, args=[url], daemon=True) for url in self._urls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.add([answers[url] for url in self._urls], self._clock())

    def add(self, answers: Sequence[Answer | NoReport], at: float) -> None:
        """Keep the answers of all servers to one poll."""
        self._servers = [
            _server(before, answer, at)
            for before, answer in zip(self._servers, answers, strict=True)
        ]
        replicas = {}
        for url, answer in zip(self._urls, answers, strict=True):
            prefix = f"{urlsplit(url).netloc} " if len(self._urls) > 1 else ""
            if isinstance(answer, Answer):
                for name, ours in answer.replicas.items():
                    replicas[f"{prefix}{name}"] = Replica.of(ours, answer.info)
        self._polls.append(Poll(at, replicas, self._numbers(replicas, at)))

    def _numbers(
        self, replicas: Mapping[str, Replica], at: float
    ) -> dict[str, dict[str, float | None]]:
        """Return the rates since the last poll, of replicas that answered both, and what is now."""
        before = self._polls[-1] if self._polls else Poll(at, {}, {})
        seconds = max(at - before.at, 1e-3)
        numbers: dict[str, dict[str, float | None]] = {}
        whole = None
        for name, replica in replicas.items():
            numbers[name] = _now([replica])
            if name in before.replicas:
                gained = replica.counts.since(before.replicas[name].counts)
                whole = gained if whole is None else whole.plus(gained)
                numbers[name] |= gained.rates(seconds)
        if replicas:
            rates = {} if whole is None else whole.rates(seconds)
            numbers[ALL] = {**_now(replicas.values()), **rates}
        return numbers

    def data(self) -> dict[str, Any]:
        """Return what the page shows."""
        last = self._polls[-1].replicas if self._polls else {}
        # when no replica answers, those that did before
        known = next((poll.replicas for poll in reversed(self._polls) if poll.replicas), {})
        seen = list(dict.fromkeys(name for poll in self._polls for name in poll.replicas))
        return {
            "window_s": WINDOW_S,
            "servers": self._servers,
            "at": [round(poll.at, 2) for poll in self._polls],
            "replicas": [self._shown(name, [name], name in last) for name in seen],
            "all": self._shown(ALL, list(known), bool(last)),
        }

    def _shown(self, name: str, parts: Sequence[str], answers: bool) -> dict[str, Any]:
        """Return the series of a replica, or of all, and the state of its parts."""
        keys = ("tokens_per_s", "accept_length", "width", "free_kv_slots", "alarms")
        numbers = [poll.numbers.get(name, {}) for poll in self._polls]
        series = {
            key: [number.get(key) for number in numbers]
            for key in (*keys, *(f"{stage}_ms" for stage in STAGES))
        }
        return {"name": name, "answers": answers, "series": series} | self._state(parts)

    def _state(self, parts: Sequence[str]) -> dict[str, Any]:
        recent = [poll for poll in self._polls if poll.at >= self._polls[-1].at - WINDOW_S]
        seconds = max(recent[-1].at - recent[0].at, 1e-3) if recent else WINDOW_S
        gained, states = Counts(), []
        for part in parts:
            states += [p.replicas[part] for p in reversed(self._polls) if part in p.replicas][:1]
            found = [poll.replicas[part].counts for poll in recent if part in poll.replicas]
            if found:
                gained = gained.plus(found[-1].since(found[0]))
        capacities = [state.capacity for state in states]
        return {
            "block_size": max((state.block_size for state in states), default=0),
            "capacity": None if None in capacities else sum(c for c in capacities if c),
            "modes": sorted({state.mode for state in states if state.mode is not None}),
            "steps": gained.steps,
            "recent": gained.rates(seconds),
            "histogram": [_ratio(count, gained.steps) for count in gained.histogram],
            "accepted_at": [_ratio(count, gained.steps) for count in gained.accepted_at],
            "survival": _mean([state.survival for state in states if state.survival]),
        }


def _server(before: Mapping[str, Any], answer: Answer | NoReport, at: float) -> dict[str, Any]:
    """Return what is known of a server after it was asked."""
    if isinstance(answer, NoReport):
        return {**before, "state": answer.state, "message": str(answer)}
    ours = next(iter(answer.replicas.values()))
    return {
        "url": before["url"],
        "state": "serving",
        "message": "",
        "answered_at": at,
        "model": answer.info.get("served_model_name") or answer.info.get("model_path"),
        "drafter": ours.get("drafter"),
        "device": ours.get("device"),
        "sglang": ours.get("sglang"),
        "version": ours.get("version"),
        "alarm_below": ours.get("alarm_below"),
        "simulated_accept_length": ours.get("simulated_accept_length"),
    }


def _now(replicas: Iterable[Replica]) -> dict[str, float | None]:
    parts = list(replicas)
    return {
        "free_kv_slots": sum(part.free_kv_slots for part in parts),
        "alarms": sum(part.alarms for part in parts),
    }


def _mean(lists: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean by position, of the lists that have it."""
    columns = ([v for v in column if v is not None] for column in zip_longest(*lists))
    return [round(sum(column) / len(column), 4) for column in columns]
