"""Servers that start at the same time on one GPU and are measured one after another.

Starting takes a minute a server and leaves the GPU idle, so `--side-by-side` starts several
together. Each is measured while the others wait for requests, asleep (`--sleep-on-idle`: SGLang's
scheduler otherwise keeps a core busy), and is stopped after its turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks import gpu, systems
from sglang_dflash.testing.server import START_TIMEOUT_S, ServerProcess

# SGLang gives KV what is free once its weights are loaded, less (1 - fraction) of what was free
# before. Neighbours that load meanwhile count as its own weights do. So of servers that start
# together the fraction bounds the sum, and an equal share of the GPU as each one's fraction would
# leave the later ones less than nothing. What keeps a pool small is its number of tokens; the
# fraction only has to let all weights and pools through.
FRACTION = 0.92
# of one server beside weights and KV: graphs, activations, the slot table and the CUDA context
OTHER_GIB = 6.0
HEADROOM = 1.25
TOKENS_AHEAD = 64  # slots that a request holds for the blocks to come

Key = TypeVar("Key")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--side-by-side", action="store_true", help="start several servers at the same time"
    )
    parser.add_argument(
        "--at-once", type=int, default=0, help="how many servers; default: as many as the GPU holds"
    )


def on_gpu() -> bool:
    return torch.cuda.is_available()


def pool_tokens(num_requests: int, tokens_per_request: int) -> int:
    """Return the size of a KV pool in which so many requests run together."""
    return int(HEADROOM * num_requests * (tokens_per_request + TOKENS_AHEAD))


def server_args(tokens: int) -> list[str]:
    """Return the arguments with which a server leaves room to its neighbours."""
    # SGLang's pool of sliding-window layers is this share of the full layers': with so few tokens
    # a share below 1 would be less than the requests' windows
    found = ["--sleep-on-idle", "--max-total-tokens", str(tokens), "--swa-full-tokens-ratio", "1"]
    return found + (["--mem-fraction-static", str(FRACTION)] if on_gpu() else [])


def at_once(
    options: argparse.Namespace, target: Path | str, drafter: Path | str, tokens: int
) -> int:
    """Return how many servers of a pair to start at the same time; 1 without --side-by-side."""
    if not options.side_by_side:
        return 1
    if options.at_once:
        return options.at_once
    if not on_gpu():
        return len(systems.SYSTEMS)
    return max(1, int(gpu.memory_gib() / server_gib(target, drafter, tokens)))


def server_gib(target: Path | str, drafter: Path | str, tokens: int) -> float:
    """Return the memory of one server with a drafter, as the doctor reads it from the configs."""
    # imports SGLang, which takes long; --at-once does without
    from sglang_dflash.commands.doctor import look_at_pair

    pair = argparse.Namespace(
        model_path=str(target),
        speculative_draft_model_path=str(drafter),
        mem_fraction_static=FRACTION,
        swa_full_tokens_ratio=1.0,
        tp_size=1,
        quantization=None,
        trust_remote_code=False,
        gpu_memory_gb=None,
    )
    findings, plan = look_at_pair(pair)
    if plan is None:
        bad = next(finding for finding in findings if finding.state == "bad")
        raise SystemExit(f"{bad.name}: {bad.found}. {bad.advice}")
    parts = {name: str(value).split() for name, value in plan["memory"].items()}
    unknown = [name for name, words in parts.items() if words[0].startswith("unknown")]
    if unknown:
        raise SystemExit(f"{target}: the size of its weights is not known. Pass --at-once.")
    weights = sum(float(w[0]) for name, w in parts.items() if name.endswith("weights"))
    kv = sum(int(w[0]) for name, w in parts.items() if "KV per token" in name)
    return weights + kv * tokens / 2**30 + OTHER_GIB


def serve_all(
    starts: Mapping[Key, Callable[[], ServerProcess]],
    stop: Callable[[Key, ServerProcess], None],
    *,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[tuple[Key, ServerProcess, RuntimeError | None]]:
    """Start all servers and wait for all; then yield each, with the error if it did not start.

    A server is stopped after its turn, and those that had none when the caller ends early.
    """
    running: dict[Key, ServerProcess] = {}
    failed: dict[Key, RuntimeError] = {}
    try:
        for key, start in starts.items():
            running[key] = start()
        for key, server in running.items():
            try:
                server.wait(timeout_s=timeout_s)
            except RuntimeError as error:
                failed[key] = error
        for key in starts:
            yield key, running[key], failed.get(key)
            stop(key, running.pop(key))
    finally:
        for key, server in running.items():
            stop(key, server)
