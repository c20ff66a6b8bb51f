"""`python -m sglang_dflash tune`: find the fastest settings for this machine, pair and load.

Each trial starts a server, asks it real questions at each number of concurrent requests, and counts
tokens per second. One thing is varied at a time, and what is faster is kept: attention backends,
block size, verify width. Finally, the memory fraction is raised by what the load leaves free.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests
import torch

from sglang_dflash.commands.doctor import look_at_pair
from sglang_dflash.commands.memory_plan import GIB
from sglang_dflash.commands.tune_settings import Plan, Settings
from sglang_dflash.config import DrafterSpec
from sglang_dflash.draft_backends import Place
from sglang_dflash.glue.startup.drafter_format import read_config
from sglang_dflash.kernels import cards
from sglang_dflash.testing.progress import Progress, say
from sglang_dflash.testing.server import ROOT, ServerProcess, free_port
from sglang_dflash.train.output_file import check_writable
from sglang_dflash.train.prompts import read_messages

# a change must gain this much: less is within the noise of two runs
LEAST_GAIN = 0.02
# rounds over the same questions: at least so many and for so long, then until the two fastest
# agree, unless that takes too long
ROUNDS, LEAST_S, MOST_S = 2, 3.0, 20.0
FEWEST_QUESTIONS = 8
CPU_SCRIPT = ROOT / "launch" / "cpu.sh"
REQUEST_TIMEOUT_S = 1800
# left free on the card for what a longer or larger load allocates
RESERVE_GIB = 2.0
MOST_FRACTION = 0.95
# prints the free bytes of the fullest card, and the bytes of a card
FREE_MEMORY = (
    "import torch; cards = [torch.cuda.mem_get_info(i) for i in range({ranks})]; "
    "print(min(free for free, _ in cards), cards[0][1])"
)
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A shop sells pens at 3 for 2 dollars. How much do 18 pens cost? Explain step by step.",
    "Explain to a child why the sky is blue.",
    "Write a polite email that declines an invitation to a conference.",
    "What are the advantages and disadvantages of electric cars?",
    "Write a SQL query that returns the ten customers with the highest revenue in 2023.",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "Solve x^2 - 5x + 6 = 0 and explain each step.",
    "Translate into French: The meeting has been moved to Thursday at ten.",
    "List five ideas for a birthday party for a ten-year-old.",
    "What does the command `grep -rn TODO src | wc -l` do?",
    "Describe how a bill becomes a law in the United States.",
)

Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Trial:
    """What was measured of one setting; `error` if it did not start or did not answer."""

    settings: Settings
    rates: dict[int, float]  # tokens per second by concurrent requests
    kv_tokens: int | None = None
    free_gib: float | None = None
    card_gib: float | None = None
    accept_length: float | None = None  # over all loads; None without DFLASH
    error: str = ""

    @property
    def score(self) -> float:
        """The geometric mean of the rates: each number of requests counts the same."""
        if self.error:
            return 0.0
        return math.exp(sum(map(math.log, self.rates.values())) / len(self.rates))

    def line(self) -> str:
        if self.error:
            return f"{self.settings}: {self.error}"
        rates = ", ".join(f"{rate:.1f} at {n}" for n, rate in self.rates.items())
        return f"{self.settings}: {rates} tokens/s"


def run_tune(options: argparse.Namespace) -> int:
    """Measure, then print the launch command; return 1 if the pair cannot be served."""
    findings, _ = look_at_pair(options)
    bad = [finding for finding in findings if finding.state == "bad"]
    for finding in bad:
        print(f"{finding.name}: {finding.found}. {finding.advice}", file=sys.stderr)
    if bad:
        return 1
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not CPU_SCRIPT.is_file():
        print(f"tune: without a GPU it needs a checkout, for {CPU_SCRIPT}.", file=sys.stderr)
        return 1
    try:
        if options.out is not None:
            check_writable(options.out, option="--out")
        chats = read_chats(options.prompts)
        plan = make_plan(options, on_gpu=on_gpu)
    except ValueError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    if not options.prompts:
        say(
            "Asking built-in questions. Acceptance depends on the text: pass --prompts to measure "
            "with yours."
        )
    trials = search(plan, lambda settings: try_settings(settings, chats, options))
    best = choose(trials)
    if best.error:
        print(f"tune: the server did not start: {best.error}", file=sys.stderr)
        return 1
    print(report(trials, best, options, on_gpu=on_gpu))
    if options.out:
        options.out.write_text(
            json.dumps(described(trials, best, options, on_gpu), indent=1) + "\n"
        )
    return 0


def read_chats(paths: Sequence[Path] | None) -> list[Chat]:
    if not paths:
        return [[{"role": "user", "content": question}] for question in QUESTIONS]
    chats = [chat for path in paths for chat in read_messages(path)]
    if not chats:
        raise ValueError(
            f"--prompts {' '.join(map(str, paths))}: no prompts found. Pass a file that has some."
        )
    return chats


def make_plan(options: argparse.Namespace, *, on_gpu: bool) -> Plan:
    path = options.speculative_draft_model_path
    config = read_config(path, trust_remote_code=options.trust_remote_code)
    drafter = DrafterSpec.from_config(config.to_dict(), name=path)
    place = Place("cpu", None, is_fp32=True)
    if on_gpu:
        kv_dtype = options.speculative_draft_kv_cache_dtype
        place = Place("cuda", cards.current().capability, is_fp32=False, kv_dtype=kv_dtype)
    return Plan.of(drafter, place, options)


def search(plan: Plan, try_: Callable[[Settings], Trial]) -> list[Trial]:
    """Return all trials: plain decoding, the settings to begin with, and the variants of each
    stage, the last of which is the memory fraction."""
    has_memory = plan.first.fraction is not None
    with Progress(2 + plan.trials() + has_memory, "servers", what="tune") as progress:

        def run(settings: Settings) -> Trial:
            progress.name(str(settings))
            trial = try_(settings)
            say(trial.line())
            progress.step()
            return trial

        plain = replace(plan.first, block=1, target_backend=None, draft_backend=None)
        trials = [run(plain), run(plan.first)]
        if trials[1].error:
            return trials
        for stage in range(len(plan.stages())):
            best = choose(trials).settings
            trials += [run(settings) for settings in plan.variants(best, stage)]
        fullest = choose(trials)
        if (fraction := larger_fraction(fullest)) is not None:
            trials.append(run(replace(fullest.settings, fraction=fraction)))
        return trials


def choose(trials: list[Trial]) -> Trial:
    """Return the trial to serve as: of those with DFLASH the first, unless a later one gains
    enough. A larger memory fraction need only lose nothing."""
    best = trials[1]
    for trial in trials[2:]:
        more_memory = (trial.settings.fraction or 0) > (best.settings.fraction or 0)
        least = 1 - LEAST_GAIN if more_memory else 1 + LEAST_GAIN
        if not trial.error and trial.score > best.score * least:
            best = trial
    return best


def larger_fraction(trial: Trial) -> float | None:
    """Return the memory fraction that leaves only the reserve free; None if there is no more."""
    if trial.free_gib is None or trial.card_gib is None or trial.settings.fraction is None:
        return None
    more = (trial.free_gib - RESERVE_GIB) / trial.card_gib
    found = math.floor(100 * min(trial.settings.fraction + more, MOST_FRACTION)) / 100
    return found if found > trial.settings.fraction else None


def try_settings(settings: Settings, chats: list[Chat], options: argparse.Namespace) -> Trial:
    """Start a server with these settings, and measure it under the load."""
    on_gpu = torch.cuda.is_available()
    port = free_port()
    program = [sys.executable, "-m", "sglang.launch_server"]
    if not on_gpu:
        program = [str(CPU_SCRIPT)]
    arguments = [*settings.arguments(options, on_gpu=on_gpu), "--port", str(port)]
    env = settings.environment() | {"PLAIN": str(int(settings.is_plain))}
    server = ServerProcess([*program, *arguments], port=port, env=env)
    try:
        with server:
            rates = {n: rate(server, chats, n, options.max_tokens) for n in options.requests}
            free, total = free_memory(options.tp_size) if on_gpu else (None, None)
            tokens = server.info().get("max_total_num_tokens")
            ours = server.state().get("sglang_dflash")
        accept_length = None if ours is None else ours["acceptance"]["accept_length"]
        return Trial(settings, rates, tokens, free, total, accept_length)
    except (RuntimeError, requests.RequestException) as error:
        return Trial(settings, {}, error=reason(str(error)))
    except subprocess.CalledProcessError as error:
        # the card did not tell its free memory
        return Trial(settings, {}, error=reason(error.stderr))


def reason(text: str) -> str:
    """Return the last line of an error, which may end with a server's log."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no reason was given"])[-1][:300]


def rate(server: ServerProcess, chats: list[Chat], num_requests: int, max_tokens: int) -> float:
    """Return tokens per second, prefill included, with so many requests at a time; of the fastest
    round of several over the same questions. Say so if no two rounds agree."""
    count = max(FEWEST_QUESTIONS, 2 * num_requests)
    asked = list(itertools.islice(itertools.cycle(chats), count))
    rates: list[float] = []
    with ThreadPoolExecutor(num_requests) as pool:
        # kernels are built at their first use
        list(pool.map(lambda chat: ask(server.url, chat, 8), asked[:num_requests]))
        start = now = time.monotonic()
        while len(rates) < ROUNDS or (
            now - start < MOST_S and (now - start < LEAST_S or spread_of(rates) > LEAST_GAIN)
        ):
            server.flush_cache()
            began = time.monotonic()
            tokens = sum(pool.map(lambda chat: ask(server.url, chat, max_tokens), asked))
            now = time.monotonic()
            rates.append(tokens / (now - began))
    if (spread := spread_of(rates)) > LEAST_GAIN:
        rounds = f"the two fastest of {len(rates)} rounds"
        say(f"{num_requests} requests: {rounds} are {spread:.0%} apart")
    return max(rates)


def spread_of(rates: list[float]) -> float:
    """Return by how much the second fastest round was slower than the fastest."""
    second, first = sorted(rates)[-2:]
    return 1 - second / first


def ask(url: str, chat: Chat, max_tokens: int) -> int:
    """Return the number of tokens in a greedy answer."""
    body: dict[str, Any] = {"model": "default", "messages": chat, "temperature": 0}
    body["max_tokens"] = max_tokens
    response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    if not response.ok:
        raise RuntimeError(f"HTTP {response.status_code}: {response.text[:300]}")
    return response.json()["usage"]["completion_tokens"]


def free_memory(ranks: int) -> tuple[float, float]:
    """Return the free GiB of the fullest card, and the GiB of a card. Another process asks, because
    this one would keep a CUDA context, which takes memory itself."""
    command = [sys.executable, "-c", FREE_MEMORY.format(ranks=ranks)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    free, total = map(int, out.split())
    return free / GIB, total / GIB


def report(trials: list[Trial], best: Trial, options: argparse.Namespace, *, on_gpu: bool) -> str:
    """Return the table of trials, and the command for the best of them."""
    titles = {n: f"tokens/s at {n}" for n in options.requests}
    plain = trials[0]
    wide = max(len(str(trial.settings)) for trial in trials)
    length = "accept length"
    lines = [f"  {'':{wide}}  " + "  ".join([*titles.values(), length])]
    for trial in trials:
        mark = "*" if trial is best else " "
        cells = [f"{trial.rates[n]:>{len(title)}.1f}" for n, title in titles.items() if trial.rates]
        if trial.accept_length is not None:
            cells.append(f"{trial.accept_length:>{len(length)}.2f}")
        lines.append(f"{mark} {str(trial.settings):{wide}}  " + ("  ".join(cells) or trial.error))
    lines.append("")
    if not plain.error:
        gains = [f"{best.rates[n] / plain.rates[n]:.2f}x at {n}" for n in options.requests]
        lines.append(f"over plain decoding: {', '.join(gains)}")
        if best.score <= plain.score:
            lines.append("Plain decoding is at least as fast here: serve this load without DFLASH.")
    if best.kv_tokens is not None:
        lines.append(f"tokens of KV: {best.kv_tokens}")
    launch = best.settings.launch_line(options, on_gpu=on_gpu)
    return "\n".join([*lines, "", "launch", f"  {launch}"])


def described(
    trials: list[Trial], best: Trial, options: argparse.Namespace, on_gpu: bool
) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(0) if on_gpu else None,
        "launch": best.settings.launch_line(options, on_gpu=on_gpu),
        "trials": [
            {
                "settings": str(t.settings),
                "tokens_per_s": t.rates,
                "accept_length": t.accept_length,
                "error": t.error or None,
            }
            for t in trials
        ],
    }
