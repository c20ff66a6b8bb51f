"""Start several servers together on one GPU and measure them one at a time.

A server takes a minute to start and leaves the GPU idle meanwhile, so `--side-by-side` starts
several together. Each is measured while the others are idle (`--sleep-on-idle`: otherwise SGLang's
scheduler busy-polls a core). All keep to the same cores, and this process to others: how fast a
scheduler runs depends on what else its core does, its other hyperthread and interrupts included.
Where servers take turns in a point, half of their cores are for the one that is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch

from benchmarks import gpu, systems
from benchmarks.systems import TOKENS_AHEAD
from sglang_dflash.testing.server import START_TIMEOUT_S, ServerProcess

# SGLang's KV pool gets the memory free after loading the weights, less (1 - fraction) of what was
# free before. Servers that load in the meantime count like its own weights. So with servers started
# together the fraction bounds their sum, and an equal share of the GPU as each one's fraction would
# leave the later ones a negative pool. Pools are kept small by --max-total-tokens; the fraction
# only has to be large enough for all weights and pools.
FRACTION = 0.92
# per server, besides weights and KV: CUDA graphs, activations, slot table and CUDA context
OTHER_GIB = 6.0
HEADROOM = 1.25

if TYPE_CHECKING:
    from sglang_dflash.commands.memory_plan import RankMemory

Key = TypeVar("Key")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--side-by-side", action="store_true", help="start several servers at the same time"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=0,
        help="servers at a time; default: 0, as many as the GPU holds",
    )


def on_gpu() -> bool:
    return torch.cuda.is_available()


def pool_tokens(num_requests: int, tokens_per_request: int) -> int:
    """Return the KV pool size, in tokens, for `num_requests` concurrent requests."""
    return int(HEADROOM * num_requests * (tokens_per_request + TOKENS_AHEAD))


def server_args(tokens: int) -> list[str]:
    """Return the arguments that make a server leave room for its neighbours."""
    # SGLang's sliding-window pool is this fraction of the full-attention pool: with so few tokens,
    # a fraction below 1 would not hold the requests' windows
    found = ["--sleep-on-idle", "--max-total-tokens", str(tokens), "--swa-full-tokens-ratio", "1"]
    return found + (["--mem-fraction-static", str(FRACTION)] if on_gpu() else [])


def at_once(
    options: argparse.Namespace, target: Path | str, drafter: Path | str, tokens: int
) -> int:
    """Return how many servers of a pair to start together; 1 without --side-by-side."""
    if not options.side_by_side:
        return 1
    if options.at_once:
        return options.at_once
    if not on_gpu():
        return len(systems.SYSTEMS)
    return max(1, int(gpu.memory_gib() / server_gib(target, drafter, tokens)))


def server_gib(target: Path | str, drafter: Path | str, tokens: int) -> float:
    """Return the memory of one server with a drafter, as `doctor` plans it from the configs."""
    from sglang_dflash.commands.memory_plan import GIB

    memory = memory_of(str(target), str(drafter))
    if memory.weights is None:
        raise SystemExit(f"{target}: the size of its weights is unknown. Pass --at-once.")
    per_token = sum(memory.target_kv.values()) + memory.draft_kv
    return (memory.weights + tokens * per_token) / GIB + OTHER_GIB


def memory_of(target: str, drafter: str) -> RankMemory:
    """Return what a pair needs on one GPU; exit with the reason if it does not fit together."""
    # imports SGLang, which is slow; --at-once avoids it
    from sglang_dflash.commands.doctor import read_pair

    asked = argparse.Namespace(
        model_path=target,
        speculative_draft_model_path=drafter,
        tp_size=1,
        quantization=None,
        trust_remote_code=False,
        swa_full_tokens_ratio=1.0,
        kv_cache_dtype=None,
        speculative_draft_kv_cache_dtype=None,
        speculative_draft_model_quantization=None,
    )
    try:
        return read_pair(asked).memory(asked)
    except (OSError, ValueError) as error:
        raise SystemExit(f"pair: {target} + {drafter}. {error}") from None


def serve_all(
    starts: Mapping[Key, Callable[[], ServerProcess]],
    stop: Callable[[Key, ServerProcess], None],
    *,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[tuple[Key, ServerProcess, RuntimeError | None]]:
    """Start all servers and wait for all; then yield each, with the error if it did not start.

    Each server is stopped after its turn, the rest if the caller ends early.
    """
    with serve_together(starts, stop, timeout_s=timeout_s) as (running, failed):
        for key in starts:
            yield key, running[key], failed.get(key)
            stop(key, running.pop(key))


def split_cores(count: int) -> tuple[set[int], set[int]]:
    """Return the cores for `count` servers, and those for this process: the first quarter, which
    often serves interrupts, too. Hyperthreads of a core stay together. There is no split of fewer
    cores, or for a single server, which a user would not bind to cores either."""
    allowed = os.sched_getaffinity(0)
    cores: dict[str, set[int]] = {}
    for thread in sorted(allowed):
        siblings = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
        name = siblings.read_text() if siblings.exists() else str(thread)
        cores.setdefault(name, set()).add(thread)
    own = len(cores) // 4
    if count == 1 or not own:
        return allowed, allowed
    ours = set().union(*list(cores.values())[:own])
    return allowed - ours, ours


class Turns:
    """Cores for the server whose turn it is, and others for those that wait: on a shared host some
    cores are slower for minutes, and a server that stayed on them would seem slower than others."""

    def __init__(self, servers: Sequence[ServerProcess]) -> None:
        self._servers = servers
        theirs, ours = split_cores(len(servers))
        cores, half = sorted(theirs), len(theirs) // 2
        # without cores of their own the servers have no turns
        self._cores = (cores[:half], cores[half:]) if half and theirs != ours else None
        self._last: ServerProcess | None = None

    def take(self, server: ServerProcess) -> None:
        """Give a server its turn."""
        if self._cores is None or server is self._last:
            return
        turn, wait = self._cores
        for other in self._servers if self._last is None else [self._last]:
            keep_to(wait, other.pid)
        keep_to(turn, server.pid)
        self._last = server


def keep_to(cores: Iterable[int], pid: int) -> None:
    """Keep a process, all below it, and their threads to some cores."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            # a thread may have ended since
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in each.threads():
                    os.sched_setaffinity(thread.id, cores)


@contextlib.contextmanager
def on_cores(share: set[int]) -> Iterator[None]:
    """Keep this thread, and the processes that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, share)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def serve_together(
    starts: Mapping[Key, Callable[[], ServerProcess]],
    stop: Callable[[Key, ServerProcess], None],
    *,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[tuple[dict[Key, ServerProcess], dict[Key, RuntimeError]]]:
    """Start all servers and wait for all; return them, and the errors of those that did not start.

    In the end all servers are stopped that are still listed.
    """
    running: dict[Key, ServerProcess] = {}
    failed: dict[Key, RuntimeError] = {}
    theirs, ours = split_cores(len(starts))
    try:
        with on_cores(theirs):
            for key, start in starts.items():
                running[key] = start()
        for key, server in running.items():
            try:
                server.wait(timeout_s=timeout_s)
            except RuntimeError as error:
                failed[key] = error
        with on_cores(ours):
            yield running, failed
    finally:
        for key, server in running.items():
            stop(key, server)
