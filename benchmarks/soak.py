"""Soak pairs of servers in mixed requests, checking every answer against plain decoding.

    python -m benchmarks.soak --requests 2000 --concurrency 24    # the embedded pair, on a CPU
    python -m benchmarks.soak --seconds 240 --pairs 4 --script tests/gpu.sh \\
        --concurrency 48 --max-running 32 --pool 3000 --chunk 512    # on a GPU

Lengths from one token to two thousand, shared prefixes, streaming, aborts at random points, a KV
pool so small that requests are retracted, and weight updates in between; greedy, seeded, penalised
and grammar-constrained. --no-seeds replaces seeded requests with unseeded ones, which have no
reference answer and must only end as requested. Passes with no wrong answer, no stuck request, all
KV slots free and flat memory; otherwise exits with status 1.

With --ranks 2 each DFLASH server has two tensor-parallel ranks, which share a GPU if there is only
one, and compare every step: a difference ends the server, and with it the storm. --steps ends the
storm after so many compared steps, and fails if --seconds come first:

    python -m benchmarks.soak --ranks 2 --steps 10000 --seconds 400 --script tests/gpu.sh \\
        --pool 3000 --chunk 512

A tiny model is host-bound: several pairs of servers, each with its own storm of requests, fill a
GPU. CUDA MPS, if its daemon runs, avoids context switches between their processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks import result_files, systems
from benchmarks.soak_requests import choose_kinds, encode_questions, write_other_weights
from benchmarks.soak_storm import STOPPED, Outcome, Pair, Storm, warm_up
from sglang_dflash.command_help import parser_of
from sglang_dflash.environment import COMPARE_RANKS
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.testing.progress import Progress
from sglang_dflash.testing.server import Server
from sglang_dflash.testing.two_ranks import TwoRanks

CONTEXT = "2048"
PLAIN_POOL = "16384"
# needed for seeds; on a GPU the verify attention is then SGLang's, not ours
DETERMINISTIC = ["--enable-deterministic-inference"]
# allowed growth of Python, its allocator and the radix cache from the first third to the end
MEMORY_SLACK_MB = 64
LONG_STORM = 500  # requests
LONG_STORM_S = 60


def faults(report: dict[str, Any]) -> list[str]:
    """Return all violated pass criteria."""
    growth = [memory[-1] - memory[len(memory) // 3] for memory in report["memory_mb"]]
    answered = sum(report["by_kind"].values()) + len(report["failed"])
    is_long = report["requests"] >= LONG_STORM
    slots, pool = report["free_kv_slots"], report["pool"]
    compared, steps = report["compared_steps"], report.get("steps", 0)
    found = {
        f"{len(report['wrong'])} wrong answers: {report['wrong'][:3]}": report["wrong"],
        f"{len(report['failed'])} failed: {report['failed'][:3]}": report["failed"],
        f"{answered} answers to {report['requests']} requests": answered < report["requests"],
        f"{slots} of {pool} KV slots are free": any(free != pool for free in slots),
        # depends on timing; a short storm may have none
        "no request was retracted: the pool is too large": is_long and not report["retractions"],
        "no request hit the prefix cache": is_long and not report["prefix_hits"],
        f"{compared} steps were compared, not {steps}": any(each < steps for each in compared),
        f"memory grew by {growth} MB": any(mb > MEMORY_SLACK_MB for mb in growth),
    }
    return [what for what, is_so in found.items() if is_so]


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    _add_load_options(parser)
    _add_server_options(parser)
    result_files.add_result_options(parser, picture=False)
    return parser


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=int, default=1000, help="total over all pairs; default: %(default)s"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0,
        help="seconds to run, instead of --requests; default: 0, not by time",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=1,
        help="server pairs, each with its own load; default: %(default)s",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        choices=(1, 2),
        default=1,
        help="of each DFLASH server; default: %(default)s",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="compared steps of a pair after which to end; default: 0, no limit",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=12,
        help="concurrent requests per pair; default: %(default)s",
    )
    parser.add_argument(
        "--updates", type=int, help="weight updates; default: 2 in a long run, else 0"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first pair; each further pair adds 1; default: %(default)s",
    )
    parser.add_argument(
        "--no-seeds",
        dest="seeds",
        action="store_false",
        help="send no seeded requests, which need deterministic mode and its own verify attention",
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    # little more than the longest request, so that a few of them do not fit at once
    parser.add_argument(
        "--pool", type=int, default=2200, help="KV slots of a DFLASH server; default: %(default)s"
    )
    parser.add_argument(
        "--chunk", type=int, default=64, help="prefill chunk size, in tokens; default: %(default)s"
    )
    parser.add_argument(
        "--max-running",
        type=int,
        default=16,
        help="running requests per server; default: %(default)s",
    )
    parser.add_argument(
        "--script", type=Path, help="script that starts a server; default: launch/cpu.sh"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.updates is None:
        is_long = options.seconds >= LONG_STORM_S or options.requests >= LONG_STORM
        options.updates = 2 if is_long else 0
    if options.pairs < 1 or options.requests < options.pairs:
        parser.error(
            f"--requests {options.requests} --pairs {options.pairs}: each pair needs at "
            "least one request"
        )
    for name in ("concurrency", "max_running", "pool", "chunk"):
        if getattr(options, name) < 1:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} {getattr(options, name)}: pass at least 1")
    for name in ("updates", "seconds", "steps"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} {getattr(options, name):g}: pass 0 or more")
    if options.steps and options.ranks == 1:
        parser.error(f"--steps {options.steps} needs --ranks 2: a single rank compares nothing")
    return options


def start(options: argparse.Namespace) -> Pair:
    """Start a pair without waiting for it."""
    common = ["--context-length", CONTEXT, "--chunked-prefill-size", str(options.chunk)]
    common += ["--max-running-requests", str(options.max_running)]
    # on a GPU every batch runs in a CUDA graph
    common += ["--cuda-graph-max-bs-decode", str(options.max_running)]
    common += DETERMINISTIC if options.seeds else []
    pool = ["--max-total-tokens", str(options.pool)]
    return Pair(
        plain=Server(*common, "--max-total-tokens", PLAIN_POOL, plain=True),
        dflash=Server(*common, *pool)
        if options.ranks == 1
        else TwoRanks(*common, *pool, env={COMPARE_RANKS: "1"}),
    )


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Iterator[list[Pair]]:
    """Start all pairs together, without waiting for them; stop them together at the end."""
    if options.script:
        Server.script = options.script.resolve()
    pairs: list[Pair] = []
    try:
        pairs += (start(options) for _ in range(options.pairs))
        yield pairs
    finally:
        named = {
            f"{name}-{number}": server
            for number, pair in enumerate(pairs)
            for name, server in pair._asdict().items()
        }
        with ThreadPoolExecutor(max(len(named), 1)) as pool:
            list(pool.map(lambda n: systems.stop_server(named[n], options.logs, n), named))


@contextlib.contextmanager
def stopping(pairs: list[Pair]) -> Iterator[None]:
    """On Ctrl-C end the storms and stop all servers: threads with requests are waited for, which
    would otherwise go on for minutes."""
    try:
        yield
    except KeyboardInterrupt:
        STOPPED.set()
        servers = [server for pair in pairs for server in pair]
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.stop(), servers))
        raise


def run(pairs: list[Pair], options: argparse.Namespace) -> dict[str, Any]:
    """Run the storms once all pairs are up, and return their report."""
    total = Outcome()
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(len(pairs)) as pool,
        stopping(pairs),
    ):
        # while the servers start
        questions = encode_questions()
        other_weights = write_other_weights(Path(folder)) if options.updates else None
        for pair in pairs:
            for server in pair:
                server.wait()
        kinds = choose_kinds(seeds=options.seeds)
        list(pool.map(lambda pair: warm_up(pair, kinds), pairs))
        began = time.monotonic()
        storms = [Storm(pair, options, i, questions) for i, pair in enumerate(pairs)]
        running = [pool.submit(storm.run, other_weights) for storm in storms]
        with Progress(100, "percent") as progress:
            while wait(running, timeout=1).not_done:
                progress.reach(100 * min(storm.progress() for storm in storms))
        for ended in running:
            total.add(ended.result())
    settings = ("pairs", "concurrency", "max_running", "pool", "chunk", "seeds", "ranks", "steps")
    return {
        **{name: getattr(options, name) for name in settings},
        "seconds": round(time.monotonic() - began, 1),
        **vars(total),
        "schedule": sorted(set(total.schedule)),
        "verify_attention": sorted(set(total.verify_attention)),
    }


def table(report: dict[str, Any]) -> str:
    """Return the key numbers as Markdown."""
    lines = ["| | |", "|---|---|"]
    lines += [f"| {kind} | {number} |" for kind, number in report["by_kind"].items()]
    names: tuple[str, ...]
    names = ("requests", "seconds", "aborted", "prefix_hits", "retractions", "updates", "tokens")
    names += ("compared_steps",) if any(report["compared_steps"]) else ()
    lines += [f"| {name.replace('_', ' ')} | {report[name]} |" for name in names]
    lines += [f"| {name} | {len(report[name])} |" for name in ("ties", "wrong", "failed")]
    lines += [f"| schedule | {', '.join(report['schedule'])} |"]
    return "\n".join(lines)


def main() -> None:
    options = parse()
    with serving(options) as pairs:
        report = {**result_files.provenance(options.commit), **run(pairs, options)}
        # before the servers stop, which may outlast the caller's timeout
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
    sys.exit(end_on_interrupt("soak", main))
