"""How many servers benchmarks/sharing.py starts at once, by the doctor's estimate for a pair."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import ROOT, gpu, sharing

SHAPES = ROOT / "benchmarks" / "shapes"
TOKENS = sharing.pool_tokens(32, 512 + 1033)


def test_a_server_holds_weights_and_the_pool() -> None:
    found = sharing.server_gib(SHAPES / "qwen3-8b", SHAPES / "qwen3-8b-draft", TOKENS)
    # 15.3 and 2.0 GiB of weights; 36 and 5 layers with 8 KV heads of 128, keys and values in bf16
    kv = TOKENS * (36 + 5) * 8 * 128 * 2 * 2 / 2**30
    assert found == pytest.approx(15.26 + 1.95 + kv + sharing.OTHER_GIB, abs=0.05)


@pytest.mark.parametrize(
    ("words", "recipe", "servers"),
    [
        ([], "qwen3-8b", 1),
        (["--side-by-side"], "qwen3-8b", 4),
        (["--side-by-side"], "qwen3-coder-30b-a3b", 1),
        (["--side-by-side", "--at-once", "2"], "qwen3-coder-30b-a3b", 2),
    ],
)
def test_as_many_servers_start_at_once_as_the_gpu_holds(
    monkeypatch: pytest.MonkeyPatch, words: list[str], recipe: str, servers: int
) -> None:
    monkeypatch.setattr(sharing, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu, "memory_gib", lambda: 139.8)
    parser = argparse.ArgumentParser()
    sharing.add_options(parser)
    pair = SHAPES / recipe, SHAPES / f"{recipe}-draft"
    assert sharing.at_once(parser.parse_args(words), *pair, TOKENS) == servers


def test_a_pair_that_does_not_fit_together_is_named() -> None:
    with pytest.raises(SystemExit, match="pair: "):
        sharing.server_gib(SHAPES / "qwen3-8b", SHAPES / "gemma4-31b-draft", TOKENS)


@pytest.mark.parametrize(
    ("threads", "servers", "ours"),
    [
        # two hyperthreads a core
        (16, 3, {0, 1, 2, 3}),
        (16, 4, {0, 1, 2, 3}),
        (8, 2, {0, 1}),
    ],
)
def test_servers_have_the_same_cores_and_their_client_others(
    monkeypatch: pytest.MonkeyPatch, threads: int, servers: int, ours: set[int]
) -> None:
    have_threads(monkeypatch, threads)
    assert sharing.split_cores(servers) == (set(range(threads)) - ours, ours)


@pytest.mark.parametrize(("threads", "servers"), [(16, 1), (6, 4)])
def test_few_cores_and_those_of_a_single_server_are_not_split(
    monkeypatch: pytest.MonkeyPatch, threads: int, servers: int
) -> None:
    have_threads(monkeypatch, threads)
    assert sharing.split_cores(servers) == (set(range(threads)), set(range(threads)))


def have_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    def siblings(path: Path) -> str:
        core = int(path.parts[5].removeprefix("cpu")) // 2 * 2
        return f"{core}-{core + 1}\n"

    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(threads)))
    monkeypatch.setattr(Path, "exists", lambda _path: True)
    monkeypatch.setattr(Path, "read_text", siblings)


def test_a_process_keeps_to_its_cores_and_ours_gets_all_back() -> None:
    before = os.sched_getaffinity(0)
    one: Any = {min(before)}
    with sharing.on_cores(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_server_whose_turn_it_is_has_the_cores_that_all_have_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Left to themselves, servers stayed on cores that were slower than the others' for minutes."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(sharing, "split_cores", lambda _: ({first, second}, {99}))
    with served() as one, served() as other:
        turns = sharing.Turns([one, other])
        for server, waiting in ((one, other), (other, one), (other, one), (one, other)):
            turns.take(server)
            assert cores_of(server) == {first} and cores_of(waiting) == {second}


def test_a_single_server_and_one_that_ended_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[int] = []
    monkeypatch.setattr(sharing, "keep_to", lambda _, pid: moved.append(pid))
    with served() as server:
        sharing.Turns([server]).take(server)
    assert moved == []
    monkeypatch.undo()
    sharing.keep_to(os.sched_getaffinity(0), server.pid)


class Running:
    """A server with a child process and a thread, without SGLang."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


@contextlib.contextmanager
def served() -> Iterator[Any]:
    child = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while len(threads_of(process.pid)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield Running(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def threads_of(pid: int) -> list[int]:
    process = psutil.Process(pid)
    below = [process, *process.children(recursive=True)]
    return [thread.id for each in below for thread in each.threads()]


def cores_of(server: Running) -> set[int]:
    """Return the cores of all threads of a server."""
    return set().union(*(os.sched_getaffinity(thread) for thread in threads_of(server.pid)))
