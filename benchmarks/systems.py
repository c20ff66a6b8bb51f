"""The three systems compared: how each is named, started and described in a table."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from sglang_dflash.testing.server import SCHEDULES, ServerProcess, free_port

SYSTEMS = ("plain", "in-tree", "ours")
# ours with overlap scheduling off, and on with the plan stream
SCHEDULED = {
    "ours-in-turn": SCHEDULES["in turn"],
    "ours-plan-stream": SCHEDULES["plan stream"],
}
BLOCK_SIZE = 16
TOKENS_AHEAD = 64  # slots that a request reserves for upcoming blocks
# ours with a verify width other than the automatic one
WIDTHS = ("uniform", *(str(rows) for rows in range(1, BLOCK_SIZE + 1)))
BACKENDS = ("triton", "fa3", "fa4", "flashinfer")
KEPT_LOG = 2_000_000  # characters
# ours at its best: its verify kernel runs inside SGLang's Triton backend
OUR_TARGET_BACKEND, OUR_DRAFT_BACKEND = "triton", "fa4"


def system_name(word: str) -> str:
    """Return `word` if it names a system: `in-tree-fa4` is SGLang's DFLASH with its target on fa4,
    `plain-triton` plain decoding on Triton, `ours-16` ours with 16 rows per request."""
    if word in SCHEDULED or named_backend(word):
        return word
    backends = f"the target's attention backend ({', '.join(BACKENDS)})"
    more = f", and SYSTEM-BACKEND, such as in-tree-fa4, {backends}"
    return _name_of_width(word, [*SYSTEMS, *SCHEDULED], more=more)


def name_of_width(word: str) -> str:
    """Return `word` if it names a system that differs from the three at most by its verify width,
    for programs that know the widths and neither schedules nor backends."""
    return _name_of_width(word, SYSTEMS)


def _name_of_width(word: str, known: Sequence[str], *, more: str = "") -> str:
    if word in SYSTEMS or named_width(word):
        return word
    raise argparse.ArgumentTypeError(
        f"{word!r} is not one of {', '.join(known)}; ours-uniform and ours-N, N from 1 to "
        f"{BLOCK_SIZE}, set the verify width{more}"
    )


def kind_of(system: str) -> str:
    """Return which of the three systems this is a variant of."""
    return next(kind for kind in SYSTEMS if system == kind or system.startswith(f"{kind}-"))


def named_backend(system: str) -> str | None:
    """Return the attention backend in a system's name, such as fa4 in `in-tree-fa4`."""
    kinds = [kind for kind in SYSTEMS if system.startswith(f"{kind}-")]
    suffix = system.removeprefix(f"{kinds[0]}-") if kinds else ""
    return suffix if suffix in BACKENDS else None


def named_width(system: str) -> str | None:
    """Return the verify width in a system's name, such as 16 in `ours-16`."""
    suffix = system.removeprefix("ours-")
    return suffix if suffix != system and suffix in WIDTHS else None


def add_systems_option(
    parser: argparse.ArgumentParser,
    name: Callable[[str], str],
    default: Sequence[str],
    *,
    nargs: str = "+",
) -> None:
    """Add the option for the systems to compare; `name` checks one's name."""
    parser.add_argument(
        "--systems",
        nargs=nargs,
        type=name,
        default=list(default),
        help="plain: no drafts; in-tree: SGLang's DFLASH; ours; or a variant, such as ours-16; "
        f"default: {' '.join(default)}",
    )


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer-attention-backend",
        help="target's backend in plain decoding and SGLang's DFLASH; default: SGLang's choice",
    )


def backend_args(system: str, target: str | Path, forced: str | None = None) -> list[str]:
    """Return the attention-backend arguments of a server.

    A system's name may set the target's backend. Otherwise ours gets its best, and plain decoding
    and SGLang's DFLASH are started as a user would start them: SGLang picks, unless
    --peer-attention-backend (`forced`) says otherwise.
    One exception is in favour of SGLang's DFLASH: with Gemma 4 it would draft on Triton, like its
    target, and gets FA4 instead.
    """
    kind = kind_of(system)
    if kind == "ours":
        backend, draft = named_backend(system) or OUR_TARGET_BACKEND, OUR_DRAFT_BACKEND
    else:
        backend = named_backend(system) or forced or ""
        draft = OUR_DRAFT_BACKEND if kind == "in-tree" and is_gemma4(target) else ""
    found = ["--attention-backend", backend] if backend else []
    return found + (["--speculative-draft-attention-backend", draft] if draft else [])


def is_gemma4(target: str | Path) -> bool:
    """Return whether a target is Gemma 4, by its config, or by its name if that is not local."""
    architectures = read_config(target).get("architectures") or [Path(target).name]
    return architectures[0].lower().replace("-", "").startswith("gemma4")


def backends_in_use(info: dict[str, Any]) -> dict[str, str]:
    """Return the attention backends that a server runs on, from its /server_info."""
    base = info["attention_backend"]
    found = {part: info.get(f"{part}_attention_backend") or base for part in ("prefill", "decode")}
    if info.get("speculative_algorithm"):
        found["draft"] = info.get("speculative_draft_attention_backend") or base
    return found


def backends_text(found: dict[str, str] | None) -> str:
    """Return e.g. "fa3" or "triton, draft fa4"; "" if not recorded."""
    if not found:
        return ""
    parts = list(dict.fromkeys([found["prefill"], found["decode"]]))
    return " / ".join(parts) + (f", draft {found['draft']}" if "draft" in found else "")


def backends_line(results: dict[str, Any]) -> str:
    """Return the line below a table that lists each system's attention backends."""
    shown = {name: backends_text(result.get("attention")) for name, result in results.items()}
    told = "; ".join(f"{name} {text}" for name, text in shown.items() if text)
    return f"Attention backends: {told}." if told else ""


def read_config(model_path: Path | str) -> dict[str, Any]:
    """Return a model's config; empty if its folder is not local."""
    path = Path(model_path) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def server_command(system: str, options: argparse.Namespace, block_size: int) -> list[str]:
    """Return the command that starts a system's server on token ids; without a GPU as
    launch/cpu.sh does."""
    on_gpu = torch.cuda.is_available()
    command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
    if not on_gpu:
        command = [str(ROOT / "launch" / "cpu.sh")]
    command += ["--port", str(options.port), "--model-path", options.model_path]
    command += ["--trust-remote-code", "--load-format", options.load_format]
    command += ["--skip-tokenizer-init"]
    if kind_of(system) != "plain":
        command += ["--speculative-algorithm", "DFLASH"]
        command += ["--speculative-draft-model-path", options.draft_model_path]
        command += ["--speculative-num-draft-tokens", str(block_size)]
    if on_gpu:
        command += backend_args(system, options.model_path, options.peer_attention_backend)
    return command


def serve(system: str, options: argparse.Namespace, *, neighbourly: list[str]) -> ServerProcess:
    """Start a system's server with the launch script that a user would use; `neighbourly` are the
    arguments that make it leave room for others."""
    port = free_port()
    if torch.cuda.is_available():
        command = [str(ROOT / "launch" / "serve.sh"), options.model_path, options.draft_model_path]
        command += backend_args(system, options.model_path, options.peer_attention_backend)
    else:
        command = [str(ROOT / "launch" / "cpu.sh"), "--model-path", options.model_path]
        if kind_of(system) != "plain":
            command += ["--speculative-draft-model-path", options.draft_model_path]
    command += [*neighbourly, *options.server_args, "--port", str(port)]
    return ServerProcess(command, env=switches(system), port=port)


def switches(system: str, simulate_accept_length: float = 0.0) -> dict[str, str]:
    """Return the environment variables that select a system."""
    kind = kind_of(system)
    if kind == "plain":
        return {"PLAIN": "1"}
    switch = "off" if kind == "in-tree" else "on"
    found = {"PLAIN": "0", "SGLANG_DFLASH": switch, **SCHEDULED.get(system, {})}
    if kind == "ours":
        found["SGLANG_DFLASH_WIDTH"] = named_width(system) or "auto"
    if simulate_accept_length:
        found["SGLANG_SIMULATE_ACC_LEN"] = str(simulate_accept_length)
    return found


def memory_by_part(state: dict[str, Any], log: str) -> dict[str, Any]:
    """Return gigabytes by part: the target's from /server_info, the drafter's from the log.

    SGLang's log has a "Load weight end" and a "Memory pool end" per model, the target's first. Its
    numbers are decreases in free memory, negative if another process freed memory in the meantime.
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


def stop_server(server: ServerProcess, logs: Path | None, name: str) -> None:
    """Stop a server; save the tail of its log in the folder `logs`, if given."""
    server.stop()
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name}.log").write_text(server.log()[-KEPT_LOG:])
