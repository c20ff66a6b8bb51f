"""What the benchmarks share: the three systems, load on their servers, and results on disk.

A result file carries its command, commit, versions and GPU; a picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "launch"))
from server import SCHEDULES, ServerProcess  # noqa: E402

SYSTEMS = ("plain", "in-tree", "ours")
# ours with overlap scheduling off, and on with the plan stream
SCHEDULED = {
    "ours-in-turn": SCHEDULES["in turn"],
    "ours-plan-stream": SCHEDULES["plan stream"],
}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
}
PROMPT_IDS = (1000, 50000)
WARM_UP_TOKENS = 8
PANELS_PER_ROW = 5
KEPT_LOG = 2_000_000  # characters


def switches(system: str, simulate_accept_length: float = 0.0) -> dict[str, str]:
    """Return the environment that makes a server one of the systems; plain needs nothing."""
    if system == "plain":
        return {}
    found = {"SGLANG_DFLASH": "off" if system == "in-tree" else "on", **SCHEDULED.get(system, {})}
    if simulate_accept_length:
        found["SGLANG_SIMULATE_ACC_LEN"] = str(simulate_accept_length)
    return found


def memory_by_part(state: dict[str, Any], log: str) -> dict[str, Any]:
    """Return gigabytes by part: the target's from /server_info, the drafter's from the log.

    SGLang's log has a "Load weight end" and a "Memory pool end" per model, the target's first. Its
    numbers are what became less free, and below 0 where another process gave memory back meanwhile.
    """
    usage = state["memory_usage"]
    weights = re.findall(r"Load weight end\..*mem usage=(-?[\d.]+) GB", log)
    pools = re.findall(r"Memory pool end\. avail mem=([\d.]+) GB", log)
    found = {
        "target_weights": usage["weight"],
        "target_kv": usage["kvcache"],
        "graphs": round(sum(usage["graph"].values()), 3),
        "free_after_start": usage["startup_available"],
        "kv_tokens": usage["token_capacity"],
        "kv_tokens_sliding": usage["token_capacity_swa"],
    }
    if len(weights) > 1:
        found["draft_weights"] = float(weights[1])
    if len(pools) > 1:
        found["draft_kv"] = round(float(pools[0]) - float(pools[1]), 2)
    return found


def generate(url: str, ids: list[int], new_tokens: int, sampling: str) -> dict[str, Any]:
    params = {**SAMPLING[sampling], "max_new_tokens": new_tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": params}
    response = requests.post(f"{url}/generate", json=body, timeout=600)
    response.raise_for_status()
    return response.json()


def prompt_ids(model_path: Path | str) -> tuple[int, int]:
    """Return the range of token ids to draw prompts from: inside the model's vocabulary."""
    path = Path(model_path) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    low, high = PROMPT_IDS
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
    """Return how long a batch takes, all started together, and its answers."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.monotonic()
        answers = list(pool.map(lambda ids: generate(url, ids, new_tokens, sampling), prompts))
        return time.monotonic() - start, answers


def ran_together(log: str) -> int:
    """Return how many requests a server ran at once, by its log; none where some were put back."""
    if "Retract requests" in log:
        return 0
    running = [int(n) for n in re.findall(r"Decode batch.* #running-req: (\d+)", log)]
    joining = re.findall(r"Prefill batch, #new-seq: (\d+).* #running-req: (\d+)", log)
    return max(running + [int(new) + int(before) for new, before in joining], default=0)


class Rate(NamedTuple):
    tokens_per_s: float
    answers: list[dict[str, Any]]  # the last batch's
    together: int  # of the requests, at once, in the batches that the rate comes from


def decode_rate(
    server: ServerProcess,
    num_requests: int,
    context: int,
    sampling: str = "greedy",
    *,
    lengths: Iterable[int],
    repeats: int,
    ids: tuple[int, int] = PROMPT_IDS,
) -> Rate:
    """Measure tokens per second.

    The rate is the difference between two output lengths, the better of the tries at each, so that
    prefill and start drop out. A batch before them pays for what is compiled at its first use: in
    the shorter batch it would make the rate too high.
    """
    short, long = lengths
    first = draw_prompts(num_requests, context, "first", ids)
    run_batch(server.url, first, WARM_UP_TOKENS, sampling)
    seconds: dict[int, float] = {}
    together: dict[int, int] = {}
    answers: list[dict[str, Any]] = []
    for length in (short, long):
        tries = []
        for repeat in range(repeats):
            prompts = draw_prompts(num_requests, context, f"{repeat} {length}", ids)
            before = len(server.log())
            taken, answers = run_batch(server.url, prompts, length, sampling)
            tries.append((taken, min(ran_together(server.log()[before:]), num_requests)))
        seconds[length], together[length] = min(tries)
    if seconds[long] <= seconds[short]:
        raise RuntimeError(
            f"{num_requests} requests of {context}: {long} tokens took {seconds[long]:.3f} s and "
            f"{short} took {seconds[short]:.3f} s. Something else disturbs the machine; take "
            "lengths that are further apart, or more repeats."
        )
    rate = num_requests * (long - short) / (seconds[long] - seconds[short])
    return Rate(rate, answers, min(together.values()))


def add_result_options(
    parser: argparse.ArgumentParser, *, picture: bool, servers: bool = True
) -> None:
    """Add where results and logs go, and what is recorded with them."""
    parser.add_argument("--commit", help="to record where the tree is a copy without its history")
    files = "OUT.json, OUT.md and OUT.png" if picture else "OUT.json and OUT.md"
    parser.add_argument("--out", type=Path, help=f"writes {files}")
    if servers:
        parser.add_argument("--logs", type=Path, help="folder for each server's log and traces")
    if picture:
        parser.add_argument("--picture", type=Path, help="only draw the picture of a result file")


def stop_server(server: ServerProcess, logs: Path | None, name: str) -> None:
    """Stop a server; where there is a folder for logs, keep the end of its own there."""
    server.stop()
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name}.log").write_text(server.log()[-KEPT_LOG:])


def provenance(commit: str | None, *, hidden: Iterable[str] = ()) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers: command, commit, card and versions."""
    import torch
    import triton

    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "command": recorded_command(("--out", "--logs", *hidden)),
        "commit": commit or git.stdout.strip() or None,
        "gpu": gpu_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang": version("sglang"),
    }


def gpu_name() -> str:
    """Return the card's name; torch would take memory on it to tell, which the servers need."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        found = subprocess.run(query, capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.splitlines()[0].strip()
    import torch

    return torch.cuda.get_device_name()


def short_path(word: str) -> str:
    """Return a path of this machine by its name, relative to the repository inside of it; any other
    word as it is."""
    if not word.startswith("/"):
        return word
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def recorded_command(hidden: Iterable[str] = ("--out", "--logs")) -> str:
    """Return the command without the options that only say where files lie."""
    kept, skip = [], False
    for word in sys.argv:
        if not skip and word not in hidden:
            kept.append(short_path(word))
        skip = word in hidden
    return " ".join(["python", *kept])


def write(
    found: dict[str, Any],
    out: Path,
    text: str,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Write OUT.json, OUT.md and, where matplotlib is at hand, OUT.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    about = f"`{found['command']}`, {found['gpu'] or 'no GPU'}, commit {found['commit']}"
    out.with_suffix(".md").write_text(f"{about}\n\n{text}\n")
    if draw is None:
        return
    try:
        draw(found, out.with_suffix(".png"))
    except ImportError:
        print(f"no picture: matplotlib is missing. Elsewhere: --picture {out}.json")


Line = list[tuple[int, float]]


def draw_rates(panels: Mapping[str, Mapping[str, Line]], found: dict[str, Any], path: Path) -> None:
    """Draw rate over requests: a panel per title, a line per label."""
    import matplotlib.pyplot as plt

    if not panels:
        return
    columns = min(len(panels), PANELS_PER_ROW)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axis.set(title=title, xlabel="concurrent requests")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("decoded tokens per second")
    axes[0][0].legend()
    figure.suptitle(f"{found['gpu'] or 'no GPU'}, commit {str(found['commit'])[:8]}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
