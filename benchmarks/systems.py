"""What the benchmarks share: the three systems, how each is started, and results on disk.

A result file carries its command, commit, versions and GPU; a picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dflash.testing.server import SCHEDULES, ServerProcess

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("plain", "in-tree", "ours")
PEERS = ("plain", "in-tree")
# ours with overlap scheduling off, and on with the plan stream
SCHEDULED = {
    "ours-in-turn": SCHEDULES["in turn"],
    "ours-plan-stream": SCHEDULES["plan stream"],
}
PANELS_PER_ROW = 5
KEPT_LOG = 2_000_000  # characters
# ours at its best: its verify kernel runs inside SGLang's Triton backend
OUR_TARGET_BACKEND, OUR_DRAFT_BACKEND = "triton", "fa4"
# two runs of a point agree so far, or the table marks it
AGREEMENT = 0.05


def system_name(word: str) -> str:
    """Return a system's name if it is one: `in-tree-fa4` is SGLang's DFLASH with its target on fa4,
    `plain-triton` plain decoding on Triton."""
    if word in SYSTEMS or word in SCHEDULED or peer_backend(word):
        return word
    known = ", ".join([*SYSTEMS, *SCHEDULED])
    raise argparse.ArgumentTypeError(
        f"{word!r} is none of {known}; plain-BACKEND and in-tree-BACKEND name a target's backend"
    )


def kind_of(system: str) -> str:
    """Return which of the three a system is."""
    return next(kind for kind in SYSTEMS if system == kind or system.startswith(f"{kind}-"))


def peer_backend(system: str) -> str | None:
    """Return the attention backend in the name of plain decoding or SGLang's DFLASH."""
    for peer in PEERS:
        if system.startswith(f"{peer}-"):
            return system.removeprefix(f"{peer}-") or None
    return None


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer-attention-backend",
        help="of the target in plain decoding and SGLang's DFLASH; default: what SGLang picks",
    )


def backend_args(system: str, target: str | Path, forced: str | None = None) -> list[str]:
    """Return the attention backends that a server is started with.

    Ours gets its best. Plain decoding and SGLang's DFLASH are started as a user would start them:
    SGLang picks, unless the system's name or --peer-attention-backend (`forced`) says otherwise.
    One choice is made for SGLang's DFLASH, in its favour: with Gemma 4 it would draft on Triton, as
    its target does, and gets FA4 instead.
    """
    kind = kind_of(system)
    if kind == "ours":
        backend, draft = OUR_TARGET_BACKEND, OUR_DRAFT_BACKEND
    else:
        backend = peer_backend(system) or forced or ""
        draft = OUR_DRAFT_BACKEND if kind == "in-tree" and is_gemma4(target) else ""
    found = ["--attention-backend", backend] if backend else []
    return found + (["--speculative-draft-attention-backend", draft] if draft else [])


def is_gemma4(target: str | Path) -> bool:
    """Tell a Gemma 4 target by its config, by its name where the config is not on this machine."""
    architectures = read_config(target).get("architectures") or [Path(target).name]
    return architectures[0].lower().replace("-", "").startswith("gemma4")


def backends_in_use(info: dict[str, Any]) -> dict[str, str]:
    """Return the attention backends that a server runs on, by its /server_info."""
    base = info["attention_backend"]
    found = {part: info.get(f"{part}_attention_backend") or base for part in ("prefill", "decode")}
    if info.get("speculative_algorithm"):
        found["draft"] = info.get("speculative_draft_attention_backend") or base
    return found


def backends_text(found: dict[str, str] | None) -> str:
    """Return e.g. "fa3" or "triton, draft fa4"; "" where it was not recorded."""
    if not found:
        return ""
    parts = list(dict.fromkeys([found["prefill"], found["decode"]]))
    return " / ".join(parts) + (f", draft {found['draft']}" if "draft" in found else "")


def backends_line(results: dict[str, Any]) -> str:
    """Return the line under a table that says which attention backends each system ran on."""
    shown = {name: backends_text(result.get("attention")) for name, result in results.items()}
    told = "; ".join(f"{name} {text}" for name, text in shown.items() if text)
    return f"Attention backends: {told}." if told else ""


def read_config(model_path: Path | str) -> dict[str, Any]:
    """Return a model's config, empty where its folder is not on this machine."""
    path = Path(model_path) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def is_unsteady(point: dict[str, Any]) -> bool:
    """Return whether two runs of a point disagree by more than a table can pass over."""
    return (point.get("spread") or 0.0) > AGREEMENT


def switches(system: str, simulate_accept_length: float = 0.0) -> dict[str, str]:
    """Return the environment that makes a server one of the systems."""
    kind = kind_of(system)
    if kind == "plain":
        return {"PLAIN": "1"}
    switch = "off" if kind == "in-tree" else "on"
    found = {"PLAIN": "0", "SGLANG_DFLASH": switch, **SCHEDULED.get(system, {})}
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
    import torch

    return ask_card("name") or torch.cuda.get_device_name()


def card_gib() -> float:
    """Return the memory of the card."""
    import torch

    mib = ask_card("memory.total")
    return float(mib) / 1024 if mib else torch.cuda.get_device_properties(0).total_memory / 2**30


def ask_card(what: str) -> str | None:
    """Return what nvidia-smi says of the first card, None where there is no nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError):
        found = subprocess.run(query, capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.splitlines()[0].strip()
    return None


def short_path(word: str) -> str:
    """Return a path of this machine by its name, relative to the repository inside of it; any other
    word as it is."""
    if not word.startswith("/"):
        return word
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def recorded_command(hidden: Iterable[str] = ("--out", "--logs")) -> str:
    """Return the command without the options that only say where files lie."""
    module = sys.modules["__main__"].__spec__
    kept = ["-m", module.name] if module else [short_path(sys.argv[0])]
    skip = False
    for word in sys.argv[1:]:
        if not skip and word not in hidden:
            kept.append(short_path(word))
        skip = word in hidden
    return " ".join(["python", *kept])


def release(found: dict[str, Any]) -> str:
    return f"SGLang {found['sglang']}"


def write(
    found: dict[str, Any],
    out: Path,
    text: str,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Write OUT.json, OUT.md and, where matplotlib is at hand, OUT.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    about = f"`{found['command']}`, {found['gpu'] or 'no GPU'}, {release(found)}, commit "
    about += f"{found['commit']}"
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
    about = [found["gpu"] or "no GPU", release(found), f"commit {str(found['commit'])[:8]}"]
    figure.suptitle(", ".join(about), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
