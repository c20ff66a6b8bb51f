"""A storm of mixed requests against pairs of servers, every answer checked against plain decoding.

    python -m benchmarks.soak --requests 2000 --concurrency 24    # the embedded pair, on a CPU
    python -m benchmarks.soak --seconds 240 --pairs 4 --script tests/gpu.sh \\
        --concurrency 48 --max-running 32 --pool 3000 --chunk 512    # on a GPU

Lengths from one token to two thousand, shared prefixes, streams, aborts at random moments, a KV
pool so small that requests are retracted, and weight updates in between; greedy, seeded, penalised
and grammar-bound. With --no-seeds there are sampled requests instead of seeded ones, which no
other answer can be compared with: they must end as they were asked to. At the end: no wrong answer,
no stuck request, every KV slot free, memory flat. Exit status 1 if any of it fails.

A tiny model is bound by the host: several pairs of servers, each with a storm of its own, fill a
card. CUDA's MPS, if its daemon runs, spares them the switching between processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import requests

from benchmarks import result_files, systems
from benchmarks.soak_requests import (
    COMPARED,
    KINDS,
    TIE,
    Answer,
    Ask,
    answer,
    choose_kinds,
    draw,
    encode_questions,
    flaw,
    gap_at_first_difference,
    write_other_weights,
)
from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.server import Server

CONTEXT = "2048"
PLAIN_POOL = "16384"
# for seeds; on a GPU the verify attention is then SGLang's, not ours
DETERMINISTIC = ("--enable-deterministic-inference",)
UPDATE_TIMEOUT_S = 120
# what Python, its allocator and the prefix tree may gain between the first third and the end
MEMORY_SLACK_MB = 64
MEMORY_SAMPLES = 12
LONG_STORM = 500  # requests
LONG_STORM_S = 60
# transformers changes torch's defaults while it loads a model, for every thread
LOADING = threading.Lock()
# a server that died fails every request from then on
MAX_FAILED = 20


class Pair(NamedTuple):
    plain: Server
    dflash: Server


@dataclass
class Outcome:
    """What came of one pair's storm; of a storm of several, all in all."""

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
    # of each pair
    memory_mb: list[list[int]] = field(default_factory=list)
    free_kv_slots: list[int | None] = field(default_factory=list)
    accept_length: list[float | None] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)
    verify_attention: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Count another pair's storm in."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Storm:
    """The storm of one pair, from a seed of its own."""

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

    def run(self, other_weights: Path | None) -> Outcome:
        """Storm, with the weights changed to and fro in between, and return what came of it."""
        weights = (tiny_target(), other_weights)
        self.began = time.monotonic()
        parts = self.options.updates + 1
        for part in range(parts):
            if part:
                self.update(weights[part % 2])
            with ThreadPoolExecutor(self.options.concurrency) as pool:
                workers = [
                    pool.submit(self.work, (part + 1) / parts)
                    for _ in range(self.options.concurrency)
                ]
            for worker in workers:
                worker.result()
            self.judge(weights[part % 2])
        self.sample_memory()
        self.outcome.memory_mb = [self.memory]
        self.outcome.retractions = self.pair.dflash.log().count("Retract requests")
        self.look_behind()
        return self.outcome

    def progress(self) -> float:
        if self.options.seconds:
            return (time.monotonic() - self.began) / self.options.seconds
        return self.outcome.requests / self.share

    def work(self, until: float) -> None:
        """Send one request after another until the storm has come so far."""
        while (ask := self.next_ask(until)) is not None:
            self.check(ask)

    def next_ask(self, until: float) -> Ask | None:
        with self.lock:
            progress = self.progress()
            if progress >= until or len(self.outcome.failed) >= MAX_FAILED:
                return None
            if progress * MEMORY_SAMPLES >= len(self.memory) + 1:
                self.sample_memory()
            self.outcome.requests += 1
            return draw(self.chance, self.kinds, self.questions)

    def check(self, ask: Ask) -> None:
        """Ask for an answer and compare it, or look at its end where it cannot be compared."""
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
        """Sort the answers that differed into ties under these weights and wrong ones."""
        for found in self.differing:
            with LOADING:
                gap = gap_at_first_difference(**found, weights=weights)
            if gap < TIE:
                self.outcome.ties.append(gap)
            else:
                self.outcome.wrong.append(json.dumps({"gap": gap, **found}))
        self.differing = []

    def update(self, weights: Path) -> None:
        """Move both servers to other weights. Requests were waited for, aborts are waited for."""
        try:
            before = self.probe()
            for server in self.pair:
                update_weights(server, weights)
            if self.probe() == before:
                raise RuntimeError("no answer changed")
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
        """Note what the server still holds once nothing is asked of it, and how it ran."""
        outcome, state = self.outcome, {}
        try:
            # without success the free slots tell
            with contextlib.suppress(RuntimeError):
                self.pair.dflash.flush_cache()
            state = self.pair.dflash.state()["sglang_dflash"]
        except requests.RequestException as error:
            outcome.failed.append(f"{error}. The log ends:\n{self.pair.dflash.log()[-3000:]}")
        outcome.free_kv_slots = [state.get("free_kv_slots")]
        outcome.accept_length = [state.get("acceptance", {}).get("accept_length")]
        outcome.schedule = [schedule_of(state)] if state else []
        outcome.verify_attention = [state["verify_attention"]] if state else []


def update_weights(server: Server, weights: Path) -> None:
    # SGLang ends where a request that was hung up on still runs at an update
    server.flush_cache()
    response = requests.post(
        f"{server.url}/update_weights_from_disk",
        json={"model_path": str(weights)},
        timeout=UPDATE_TIMEOUT_S,
    )
    if not response.ok or not response.json()["success"]:
        raise RuntimeError(f"HTTP {response.status_code}: {response.text}")


def schedule_of(state: dict[str, Any]) -> str:
    """Return the name of a schedule in `server.SCHEDULES`."""
    if state["plan_stream"]:
        return "plan stream"
    return "overlap" if state["overlap_schedule"] else "in turn"


def memory_mb(server: Server) -> int:
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(server.pid)
        for process in (parent, *parent.children(recursive=True)):
            total += process.memory_info().rss
    return round(total / 2**20)


def warm_up(pair: Pair, kinds: list[str]) -> None:
    """Ask for answers of each kind, so that nothing is compiled while requests wait."""
    for name in kinds:
        compared = name in COMPARED
        seed = {"sampling_seed": 1} if compared and KINDS[name]["temperature"] else {}
        for server in pair if compared else (pair.dflash,):
            server.generate([5, 6, 7], max_new_tokens=8, **KINDS[name], **seed)
            server.generate_all([[5, 6, 7]] * 4, max_new_tokens=8, **KINDS[name], **seed)


def faults(report: dict[str, Any]) -> list[str]:
    """Return everything that is not as it must be."""
    growth = [memory[-1] - memory[len(memory) // 3] for memory in report["memory_mb"]]
    answered = sum(report["by_kind"].values()) + len(report["failed"])
    is_long = report["requests"] >= LONG_STORM
    slots, pool = report["free_kv_slots"], report["pool"]
    found = {
        f"{len(report['wrong'])} wrong answers: {report['wrong'][:3]}": report["wrong"],
        f"{len(report['failed'])} failed: {report['failed'][:3]}": report["failed"],
        f"{answered} answers to {report['requests']} requests": answered < report["requests"],
        f"{slots} of {pool} KV slots are free": any(free != pool for free in slots),
        # a matter of timing; a short storm may do without
        "no request was retracted: the pool is too large": is_long and not report["retractions"],
        "no request began like another": is_long and not report["prefix_hits"],
        f"memory grew by {growth} MB": any(mb > MEMORY_SLACK_MB for mb in growth),
    }
    return [what for what, is_so in found.items() if is_so]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="of all pairs together")
    parser.add_argument("--seconds", type=float, default=0, help="run this long instead")
    parser.add_argument("--pairs", type=int, default=1, help="of servers, each with its own storm")
    parser.add_argument("--concurrency", type=int, default=12, help="requests at once, of a pair")
    parser.add_argument("--updates", type=int, help="of the weights; 2 in a long storm, or none")
    parser.add_argument("--seed", type=int, default=0, help="the first pair's; the next has 1 more")
    parser.add_argument(
        "--no-seeds",
        dest="seeds",
        action="store_false",
        help="no seeded requests, and so no deterministic mode, which has its own verify attention",
    )
    # little more than the longest request, so that a few of them do not fit together
    parser.add_argument("--pool", type=int, default=2200, help="KV slots of a DFLASH server")
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a prefill")
    parser.add_argument("--max-running", type=int, default=16, help="requests that a server runs")
    parser.add_argument("--script", type=Path, help="starts a server; launch/cpu.sh if not given")
    result_files.add_result_options(parser, picture=False)
    options = parser.parse_args(arguments)
    if options.updates is None:
        is_long = options.seconds >= LONG_STORM_S or options.requests >= LONG_STORM
        options.updates = 2 if is_long else 0
    if options.pairs < 1 or options.requests < options.pairs:
        parser.error(f"--requests {options.requests} do not give each of {options.pairs} pairs one")
    return options


def start(options: argparse.Namespace) -> Pair:
    """Start a pair without waiting for it."""
    common = ("--context-length", CONTEXT, "--chunked-prefill-size", str(options.chunk))
    common += ("--max-running-requests", str(options.max_running))
    # on a GPU every batch is run by a graph
    common += ("--cuda-graph-max-bs", str(options.max_running))
    common += DETERMINISTIC if options.seeds else ()
    return Pair(
        plain=Server(*common, "--max-total-tokens", PLAIN_POOL, plain=True),
        dflash=Server(*common, "--max-total-tokens", str(options.pool)),
    )


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Iterator[list[Pair]]:
    """Start all pairs together and wait for them; stop them together in the end."""
    if options.script:
        Server.script = options.script.resolve()
    pairs: list[Pair] = []
    try:
        pairs += (start(options) for _ in range(options.pairs))
        for pair in pairs:
            for server in pair:
                server.wait()
        yield pairs
    finally:
        named = {
            f"{name}-{number}": server
            for number, pair in enumerate(pairs)
            for name, server in pair._asdict().items()
        }
        with ThreadPoolExecutor(max(len(named), 1)) as pool:
            stop = partial(systems.stop_server, logs=options.logs)
            list(pool.map(lambda name: stop(named[name], name=name), named))


def run(pairs: list[Pair], options: argparse.Namespace) -> dict[str, Any]:
    """Let the storms loose on all pairs, and return their report."""
    total = Outcome()
    questions = encode_questions()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(pairs)) as pool:
        other_weights = write_other_weights(Path(folder)) if options.updates else None
        kinds = choose_kinds(seeds=options.seeds)
        list(pool.map(lambda pair: warm_up(pair, kinds), pairs))
        began = time.monotonic()
        storms = [Storm(pair, options, i, questions) for i, pair in enumerate(pairs)]
        for outcome in pool.map(lambda storm: storm.run(other_weights), storms):
            total.add(outcome)
    settings = ("pairs", "concurrency", "max_running", "pool", "chunk", "seeds")
    return {
        **{name: getattr(options, name) for name in settings},
        "seconds": round(time.monotonic() - began, 1),
        **vars(total),
        "schedule": sorted(set(total.schedule)),
        "verify_attention": sorted(set(total.verify_attention)),
    }


def table(report: dict[str, Any]) -> str:
    """Return what counts, as Markdown."""
    lines = ["| | |", "|---|---|"]
    lines += [f"| {kind} | {number} |" for kind, number in report["by_kind"].items()]
    names = ("requests", "seconds", "aborted", "prefix_hits", "retractions", "updates", "tokens")
    lines += [f"| {name.replace('_', ' ')} | {report[name]} |" for name in names]
    lines += [f"| {name} | {len(report[name])} |" for name in ("ties", "wrong", "failed")]
    lines += [f"| schedule | {', '.join(report['schedule'])} |"]
    return "\n".join(lines)


def main() -> None:
    options = parse()
    with serving(options) as pairs:
        report = {**result_files.provenance(options.commit), **run(pairs, options)}
        # before the servers stop, which may take longer than whoever waits for the report
        shown = table(report)
        if options.out:
            result_files.write(report, options.out, shown)
        print(shown)
        print(
            json.dumps({name: report[name] for name in ("memory_mb", "free_kv_slots", "ties")}),
            flush=True,
        )
    problems = faults(report)
    for problem in problems:
        print(f"FAULT: {problem}")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
