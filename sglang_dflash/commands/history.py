"""What servers have reported lately: rates between polls, by replica and in sum."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from urllib.parse import urlsplit

from sglang_dflash.commands.ask import Answer, NoReport, ask, understanding
from sglang_dflash.commands.counts import STAGES, Counts, gained, ratio

POLLS = 300  # kept
WINDOW_S = 60.0  # of what is shown by position
ALL = "all replicas"


@dataclass(frozen=True)
class Replica:
    """A replica at one poll."""

    counts: Counts
    alarms: int
    free_kv_slots: int
    capacity: int | None  # KV slots, if the server says so
    block_size: int
    mode: str | None  # of the verify width
    survival: Sequence[float | None]

    @classmethod
    def of(cls, ours: Mapping[str, Any], info: Mapping[str, Any]) -> Replica:
        width, capacity = ours.get("width"), info.get("max_total_num_tokens")
        survival = [] if width is None else width["survival"]
        return cls(
            counts=Counts.of(ours),
            alarms=int(ours["alarms"]),
            free_kv_slots=int(ours["free_kv_slots"]),
            capacity=None if capacity is None else int(capacity),
            block_size=len(ours["acceptance"]["histogram"]),
            mode=None if width is None else str(width["mode"]),
            survival=[None if value is None else float(value) for value in survival],
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
        servers = []
        replicas: dict[str, Replica] = {}
        for url, before, answer in zip(self._urls, self._servers, answers, strict=True):
            prefix = f"{urlsplit(url).netloc} " if len(self._urls) > 1 else ""
            try:
                found = _replicas(url, answer)
                servers.append(_server(before, answer, at))
            except NoReport as error:
                found = {}
                servers.append(_server(before, error, at))
            replicas |= {f"{prefix}{name}": replica for name, replica in found.items()}
        self._servers = servers
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
                added = replica.counts.since(before.replicas[name].counts)
                whole = added if whole is None else whole.plus(added)
                numbers[name] |= added.rates(seconds)
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
        added, states = Counts(), []
        for part in parts:
            states += [p.replicas[part] for p in reversed(self._polls) if part in p.replicas][:1]
            counts = [poll.replicas[part].counts for poll in recent if part in poll.replicas]
            added = added.plus(gained(counts))
        capacities = [state.capacity for state in states]
        return {
            "block_size": max((state.block_size for state in states), default=0),
            "capacity": None if None in capacities else sum(c for c in capacities if c),
            "modes": sorted({state.mode for state in states if state.mode is not None}),
            "steps": added.steps,
            "recent": added.rates(seconds),
            "histogram": [ratio(count, added.steps) for count in added.histogram],
            "accepted_at": [ratio(count, added.steps) for count in added.accepted_at],
            "survival": _mean([state.survival for state in states if state.survival]),
        }


def _replicas(url: str, answer: Answer | NoReport) -> dict[str, Replica]:
    """Return a server's replicas by name, none if it has nothing to report. Raise NoReport if what
    it reports is not understood: the other servers are shown all the same."""
    if isinstance(answer, NoReport):
        return {}
    with understanding(url):
        return {name: Replica.of(ours, answer.info) for name, ours in answer.replicas.items()}


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


def _mean(lists: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the mean by position, of the lists that have it."""
    columns = ([v for v in column if v is not None] for column in zip_longest(*lists))
    return [round(sum(column) / len(column), 4) for column in columns]
