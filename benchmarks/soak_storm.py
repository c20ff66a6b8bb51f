"""A storm of requests on one pair of servers, and its outcome; benchmarks/soak.py runs several."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import requests

from benchmarks.soak_requests import (
    COMPARED,
    KINDS,
    TIE,
    Answer,
    Ask,
    answer,
    choose_kinds,
    draw,
    flaw,
    gap_at_first_difference,
)
from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.server import Server
from sglang_dflash.testing.two_ranks import TwoRanks

UPDATE_TIMEOUT_S = 120
MEMORY_SAMPLES = 12
POLL_S = 2
# transformers changes torch's global defaults while loading a model, for all threads
LOADING = threading.Lock()
# for Ctrl-C, which only the main thread hears of
STOPPED = threading.Event()
# a dead server fails every further request
MAX_FAILED = 20


class Pair(NamedTuple):
    plain: Server
    dflash: Server


@dataclass
class Outcome:
    """The outcome of one pair's storm, or the total of several."""

    requests: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    tokens: int = 0
    prefix_hits: int = 0
    retractions: int = 0
    updates: int = 0
    ties: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    # one entry per pair
    memory_mb: list[list[int]] = field(default_factory=list)
    free_kv_slots: list[int | None] = field(default_factory=list)
    accept_length: list[float | None] = field(default_factory=list)
    compared_steps: list[int] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)
    verify_attention: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Add another pair's outcome."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Storm:
    """The storm on one pair, with its own seed."""

    def __init__(
        self, pair: Pair, options: argparse.Namespace, number: int, questions: list[list[int]]
    ) -> None:
        self.pair, self.options, self.number = pair, options, number
        self.share = options.requests // options.pairs + (number < options.requests % options.pairs)
        self.chance = random.Random(options.seed + number)
        self.kinds = choose_kinds(seeds=options.seeds)
        self.questions = questions
        self.outcome = Outcome()
        self.differing: list[dict[str, Any]] = []
        self.memory: list[int] = []
        self.lock = threading.Lock()
        # compared by the ranks, when last asked
        self.steps, self.asked = 0, 0.0
        self.began = time.monotonic()

    def run(self, other_weights: Path | None) -> Outcome:
        """Run the storm, switching the weights back and forth in between; return its outcome."""
        weights = [tiny_target(), *([other_weights] if other_weights else [])]
        self.began = time.monotonic()
        parts = self.options.updates + 1
        for part in range(parts):
            if part:
                self.update(weights[part % len(weights)])
            with ThreadPoolExecutor(self.options.concurrency) as pool:
                workers = [
                    pool.submit(self.work, (part + 1) / parts)
                    for _ in range(self.options.concurrency)
                ]
            for worker in workers:
                worker.result()
            if STOPPED.is_set():
                return self.outcome
            self.judge(weights[part % len(weights)])
        self.sample_memory()
        self.outcome.memory_mb = [self.memory]
        self.outcome.retractions = self.pair.dflash.log().count("Retract requests")
        self.look_behind()
        return self.outcome

    def progress(self) -> float:
        """Return the part of the storm that is over, by whichever limit comes first."""
        steps, now = self.options.steps, time.monotonic()
        if steps and now - self.asked > POLL_S:
            self.asked = now
            with contextlib.suppress(requests.RequestException):
                self.steps = self.pair.dflash.state()["sglang_dflash"]["compared_steps"]
        by_steps = self.steps / steps if steps else 0.0
        if self.options.seconds:
            return max(by_steps, (now - self.began) / self.options.seconds)
        return by_steps if steps else self.outcome.requests / self.share

    def work(self, until: float) -> None:
        """Send one request after another until the progress reaches `until`."""
        while (ask := self.next_ask(until)) is not None:
            self.check(ask)

    def next_ask(self, until: float) -> Ask | None:
        with self.lock:
            if STOPPED.is_set():
                return None
            progress = self.progress()
            if progress >= until or len(self.outcome.failed) >= MAX_FAILED:
                return None
            if progress * MEMORY_SAMPLES >= len(self.memory) + 1:
                self.sample_memory()
            self.outcome.requests += 1
            return draw(self.chance, self.kinds, self.questions)

    def check(self, ask: Ask) -> None:
        """Send a request and compare its answer, or check its end if it cannot be compared."""
        expected = None
        try:
            if ask.is_compared:
                expected = answer(self.pair.plain.url, ask, whole=True)
            found = answer(self.pair.dflash.url, ask, whole=False)
        except (requests.RequestException, ValueError) as error:
            with self.lock:
                self.outcome.failed.append(f"{ask.kind}: {error}")
            return
        with self.lock:
            self.count(ask, found)
            if expected is None:
                if reason := flaw(ask, found):
                    self.outcome.wrong.append(f"{ask.kind}: {reason}")
                return
            want = expected.tokens
            if ask.abort_after is not None:
                want = want[: len(found.tokens)]
            if found.tokens != want:
                self.differing.append({"ask": asdict(ask), "want": want, "got": found.tokens})

    def count(self, ask: Ask, found: Answer) -> None:
        self.outcome.by_kind[ask.kind] += 1
        self.outcome.aborted += ask.abort_after is not None
        self.outcome.tokens += len(found.tokens)
        self.outcome.prefix_hits += found.cached > 0

    def judge(self, weights: Path) -> None:
        """Classify the differing answers as ties under these weights, or as wrong."""
        for found in self.differing:
            with LOADING:
                gap = gap_at_first_difference(**found, weights=weights)
            if gap < TIE:
                self.outcome.ties.append(gap)
            else:
                self.outcome.wrong.append(json.dumps({"gap": gap, **found}))
        self.differing = []

    def update(self, weights: Path) -> None:
        """Load other weights into both servers. Requests have finished; aborts are waited for."""
        try:
            before = self.probe()
            for server in self.pair:
                update_weights(server, weights)
            if self.probe() == before:
                raise RuntimeError("it changed no answer")
            self.outcome.updates += 1
        except (requests.RequestException, RuntimeError) as error:
            self.outcome.failed.append(f"weight update: {error}")

    def probe(self) -> list[list[int]]:
        plain = self.pair.plain
        answers = plain.generate_all(self.questions[:4], max_new_tokens=32, ignore_eos=True)
        return [found["output_ids"] for found in answers]

    def sample_memory(self) -> None:
        self.memory.append(memory_mb(self.pair.dflash))
        print(
            f"pair {self.number}: {time.monotonic() - self.began:.0f} s, "
            f"{self.outcome.requests} sent, {len(self.outcome.failed)} failed, "
            f"{self.outcome.updates} updates, {self.memory[-1]} MB",
            flush=True,
        )

    def look_behind(self) -> None:
        """Record what the idle server still holds, and how it ran."""
        outcome, state = self.outcome, {}
        try:
            # if it fails, the free slots show it
            with contextlib.suppress(RuntimeError):
                self.pair.dflash.flush_cache()
            state = self.pair.dflash.state()["sglang_dflash"]
        except requests.RequestException as error:
            outcome.failed.append(f"{error}. The log ends:\n{self.pair.dflash.log()[-3000:]}")
        outcome.free_kv_slots = [state.get("free_kv_slots")]
        outcome.accept_length = [state.get("acceptance", {}).get("accept_length")]
        outcome.compared_steps = [state.get("compared_steps", 0)]
        outcome.schedule = [schedule_of(state)] if state else []
        outcome.verify_attention = [state["verify_attention"]] if state else []


def update_weights(server: Server, weights: Path) -> None:
    # SGLang exits if an aborted request is still running at an update
    server.flush_cache()
    response = requests.post(
        f"{server.url}/update_weights_from_disk",
        json={"model_path": str(weights)},
        timeout=UPDATE_TIMEOUT_S,
    )
    if not response.ok or not response.json()["success"]:
        raise RuntimeError(f"HTTP {response.status_code}: {response.text}")


def schedule_of(state: dict[str, Any]) -> str:
    """Return the server's schedule, by its name in `SCHEDULES`."""
    if state["plan_stream"]:
        return "plan stream"
    return "overlap" if state["overlap_schedule"] else "in turn"


def memory_mb(server: Server) -> int:
    total = memory_mb(server.other) * 2**20 if isinstance(server, TwoRanks) else 0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(server.pid)
        for process in (parent, *parent.children(recursive=True)):
            total += process.memory_info().rss
    return round(total / 2**20)


def warm_up(pair: Pair, kinds: list[str]) -> None:
    """Send requests of each kind, so that nothing is compiled during the storm."""
    for name in kinds:
        compared = name in COMPARED
        params = {**KINDS[name], "max_new_tokens": 8}
        if compared and params["temperature"]:
            params["sampling_seed"] = 1
        for server in pair if compared else (pair.dflash,):
            server.generate([5, 6, 7], **params)
            server.generate_all([[5, 6, 7]] * 4, **params)
