"""A storm of mixed requests against one server, every answer checked against plain decoding.

    python benchmarks/soak.py --requests 1000            # the embedded pair, on a CPU
    python benchmarks/soak.py --seconds 300 --concurrency 32 --script tests/gpu.sh  # on a GPU

Lengths from one token to two thousand, shared prefixes, streams, aborts at random moments, a KV
pool so small that requests are retracted; greedy, seeded, penalised and grammar-bound. At the end:
no wrong answer, no stuck request, every KV slot free, memory flat. Exit status 1 if any of it
fails.

Two tokens can be so close that the rounding of a differently shaped batch decides between them,
with and without speculation. A differing answer counts as such a tie, and is reported, only if in
fp64 the two tokens at the first difference are equal to within TIE; anything else is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.pairs import tiny_target
from sglang_dflash.train.batches import encode_prompt
from sglang_dflash.train.data import VOCAB_SIZE as VOCAB
from sglang_dflash.train.data import sample_prompts

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "launch"))
from server import Server  # noqa: E402

# little more than the longest request, so that a few of them do not fit together
POOL = 2200
SERVER = (
    "--context-length",
    "2048",
    "--chunked-prefill-size",
    "64",
    "--max-running-requests",
    "16",
)
# for seeds; on a GPU the verify attention is then SGLang's, not ours
DETERMINISTIC = ("--enable-deterministic-inference",)
SAMPLED = {"temperature": 1.4}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    # always filtered: SGLang draws an unfiltered request with other noise when a filtered one is in
    # its batch, so a seed gives another text beside another neighbour, with and without DFLASH
    "seeded, top_k": SAMPLED | {"top_k": 40},
    "seeded, top_k and top_p": SAMPLED | {"top_k": 12, "top_p": 0.9},
    # one penalty: without overlap SGLang applies several in an order that varies
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.6},
    "grammar": {"temperature": 0.0, "regex": "([a-z]{2,7} ){3,30}[a-z]+"},
}
REQUEST_TIMEOUT_S = 180
# what Python, its allocator and the prefix tree may gain between the first third and the end
MEMORY_SLACK_MB = 64
LONG_STORM = 500  # requests
# of two log-probabilities: about ten times what fp32 leaves of a logit of the embedded target
TIE = 1e-5


@dataclass(frozen=True)
class Ask:
    """One request of the storm."""

    kind: str
    body: dict[str, Any]
    stream: bool
    abort_after: int | None  # chunks; None to read to the end


@dataclass
class Outcome:
    asked: Counter[str] = field(default_factory=Counter)
    differing: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    aborted: int = 0
    tokens: int = 0


def choose_kinds(options: argparse.Namespace) -> list[str]:
    """Return the kinds of requests that can be compared with plain decoding."""
    return [name for name, kind in KINDS.items() if options.seeds or not kind["temperature"]]


def draw(chance: random.Random, kinds: list[str], questions: list[list[int]]) -> Ask:
    """Make up a request: a question, which is drafted well, or noise, of which half begins like
    other noise."""
    kind = chance.choice(kinds)
    length = chance.choice([1, 2, 7, 30, 63, 64, 65, 120, 250, 250, 700, 1800])
    if chance.random() < 0.5:
        prompt = chance.choice(questions)
    elif chance.random() < 0.5:
        shared = random.Random(chance.randrange(4))
        prompt = [shared.randrange(5, VOCAB) for _ in range(length)]
        prompt += [chance.randrange(5, VOCAB) for _ in range(chance.randrange(1, 9))]
    else:
        prompt = [chance.randrange(5, VOCAB) for _ in range(length)]
    params = {
        **KINDS[kind],
        "max_new_tokens": chance.choice([1, 2, 15, 16, 17, 40, 90, 200]),
        # after the end of a grammar's text SGLang would emit one stray token without speculation
        "ignore_eos": kind != "grammar" and chance.random() < 0.5,
    }
    if params["temperature"] > 0:
        params["sampling_seed"] = chance.randrange(1 << 40)
    stream = chance.random() < 0.5
    abort = stream and chance.random() < 0.4
    return Ask(
        kind=kind,
        body={"input_ids": prompt, "sampling_params": params},
        stream=stream,
        abort_after=chance.randrange(1, 8) if abort else None,
    )


def answer(url: str, ask: Ask, *, whole: bool) -> list[int]:
    """Return the tokens that came; `whole` ignores that the storm would hang up."""
    body = {**ask.body, "stream": ask.stream and not whole}
    response = requests.post(
        f"{url}/generate", json=body, stream=body["stream"], timeout=REQUEST_TIMEOUT_S
    )
    response.raise_for_status()
    if not body["stream"]:
        return response.json()["output_ids"]
    found: list[int] = []
    with response:
        chunks = 0
        for line in response.iter_lines():
            if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                continue
            # each chunk holds the answer so far
            found = json.loads(line[5:])["output_ids"]
            chunks += 1
            if chunks == ask.abort_after:
                break
    return found


def check(plain_url: str, url: str, ask: Ask, outcome: Outcome, lock: threading.Lock) -> None:
    try:
        expected = answer(plain_url, ask, whole=True)
        found = answer(url, ask, whole=False)
    except requests.RequestException as error:
        with lock:
            outcome.failed.append(f"{ask.kind}: {error}")
        return
    if ask.abort_after is not None:
        expected = expected[: len(found)]
    with lock:
        outcome.asked[ask.kind] += 1
        outcome.aborted += ask.abort_after is not None
        outcome.tokens += len(found)
        if found != expected:
            outcome.differing.append({"ask": asdict(ask), "want": expected, "got": found})


def gap_at_first_difference(ask: dict[str, Any], want: list[int], got: list[int]) -> float:
    """Return how far apart the two tokens' log-probabilities are in fp64; infinite if one ended."""
    k = next((k for k, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
    if k is None:
        return float("inf")
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float64)
    with torch.no_grad():
        ids = torch.tensor([ask["body"]["input_ids"] + want[:k]])
        logits = target(ids).logits[0, -1]
    penalty = ask["body"]["sampling_params"].get("frequency_penalty", 0.0)
    penalised = [
        logits[token].item() - penalty * want[:k].count(token) for token in (want[k], got[k])
    ]
    return abs(penalised[0] - penalised[1])


def encode_questions() -> list[list[int]]:
    """Return questions that the embedded pair can answer, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    return [
        encode_prompt(tokenizer, [{"role": "user", "content": text}])
        for text in sample_prompts(60, seed=3)
    ]


def memory_mb(server: Server) -> float:
    parent = psutil.Process(server.pid)
    family = [parent, *parent.children(recursive=True)]
    return sum(process.memory_info().rss for process in family) / 2**20


def warm_up(kinds: list[str], *servers: Server) -> None:
    """Ask for one answer of each kind, so that nothing is compiled while requests wait."""
    for server in servers:
        for kind in (KINDS[name] for name in kinds):
            params = {**kind, **({"sampling_seed": 1} if kind["temperature"] else {})}
            server.generate([5, 6, 7], max_new_tokens=8, **params)
            server.generate_all([[5, 6, 7]] * 4, max_new_tokens=8, **params)


def storm(plain: Server, dflash: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Run the storm and return what came of it."""
    chance = random.Random(options.seed)
    questions, kinds = encode_questions(), choose_kinds(options)
    outcome, lock = Outcome(), threading.Lock()
    began = time.monotonic()
    memory: list[float] = []

    def over(sent: int) -> bool:
        if options.seconds:
            return time.monotonic() - began > options.seconds
        return sent >= options.requests

    with ThreadPoolExecutor(options.concurrency) as pool:
        waiting: list[Any] = []
        sent = 0
        while not over(sent):
            waiting = [future for future in waiting if not future.done()]
            if len(waiting) >= options.concurrency:
                time.sleep(0.01)
                continue
            ask = draw(chance, kinds, questions)
            waiting.append(pool.submit(check, plain.url, dflash.url, ask, outcome, lock))
            sent += 1
            if sent % 50 == 0:
                memory.append(memory_mb(dflash))
                print(
                    f"{sent} sent, {len(outcome.differing)} differ, {memory[-1]:.0f} MB", flush=True
                )
    memory.append(memory_mb(dflash))
    gaps = [gap_at_first_difference(**found) for found in outcome.differing]
    judged = list(zip(outcome.differing, gaps, strict=True))
    return {
        "requests": sent,
        "seconds": round(time.monotonic() - began, 1),
        "by_kind": dict(outcome.asked),
        "aborted": outcome.aborted,
        "tokens": outcome.tokens,
        "retractions": dflash.log().count("Retract requests"),
        "ties": [gap for gap in gaps if gap < TIE],
        "wrong": [json.dumps(found) for found, gap in judged if gap >= TIE],
        "failed": outcome.failed,
        "memory_mb": [round(value) for value in memory],
        "verify_attention": dflash.state()["sglang_dflash"]["verify_attention"],
        **leftovers(dflash),
    }


def leftovers(server: Server) -> dict[str, Any]:
    """Return what the server still holds once nothing is asked of it."""
    # without success the free slots tell
    with contextlib.suppress(RuntimeError):
        server.flush_cache()
    state = server.state()["sglang_dflash"]
    return {
        "free_kv_slots": state["free_kv_slots"],
        "accept_length": state["acceptance"]["accept_length"],
    }


def faults(report: dict[str, Any]) -> list[str]:
    """Return everything that is not as it must be."""
    memory = report["memory_mb"]
    growth = memory[-1] - memory[len(memory) // 3]
    found = {
        f"{len(report['wrong'])} wrong answers: {report['wrong'][:3]}": report["wrong"],
        f"{len(report['failed'])} requests failed: {report['failed'][:3]}": report["failed"],
        f"{report['free_kv_slots']} of {POOL} KV slots are free": report["free_kv_slots"] != POOL,
        # a matter of timing; a short storm may do without
        "no request was retracted: the pool is too large": (
            report["requests"] >= LONG_STORM and not report["retractions"]
        ),
        f"memory grew by {growth} MB": growth > MEMORY_SLACK_MB,
    }
    return [what for what, is_so in found.items() if is_so]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0, help="run this long instead")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-seeds",
        dest="seeds",
        action="store_false",
        help="no seeded requests, and so no deterministic mode, which has its own verify attention",
    )
    parser.add_argument("--script", type=Path, help="starts a server; launch/cpu.sh if not given")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start both servers, let the storm loose, and return its report."""
    if options.script:
        Server.script = options.script.resolve()
    common = SERVER + (DETERMINISTIC if options.seeds else ())
    plain = Server(*common, "--max-total-tokens", "16384", plain=True)
    dflash = Server(*common, "--max-total-tokens", str(POOL))
    try:
        plain.wait()
        dflash.wait()
        warm_up(choose_kinds(options), plain, dflash)
        return storm(plain, dflash, options)
    finally:
        plain.stop()
        dflash.stop()


def main() -> None:
    options = parse()
    report = run(options)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    shown = {key: value for key, value in report.items() if key not in ("wrong", "failed")}
    print(json.dumps(shown, indent=1))
    problems = faults(report)
    for problem in problems:
        print(f"FAULT: {problem}")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
