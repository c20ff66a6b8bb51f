"""Faults that must end a server, cleanly."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import requests

from benchmarks import batch_load
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import SCRIPTED, SHAPE, start_together


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers, one per way of ending."""
    folder = tmp_path_factory.mktemp("doomed")
    env = {"PYTHONPATH": SCRIPTED, "SCRIPT_FOLDER": str(folder)}
    servers = start_together(Server(*SHAPE, env=env), Server(*SHAPE, env=env))
    yield servers
    for server in servers:
        server.stop()


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Return the processes that are still alive after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]
        if not alive:
            return []
        time.sleep(0.3)
    return alive


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def family(server: Server) -> list[int]:
    parent = psutil.Process(server.pid)
    return [parent.pid, *(child.pid for child in parent.children(recursive=True))]


def load(server: Server, prompts: list[list[int]]) -> list[threading.Thread]:
    """Return once long answers to all prompts are on their way. Request errors are expected in
    these tests."""

    def one(ids: list[int]) -> None:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        try:
            requests.post(f"{server.url}/generate", json=body, timeout=180)
        except requests.RequestException:
            return

    threads = [threading.Thread(target=one, args=(ids,)) for ids in prompts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while batch_load.ran_together(server.log()) < len(prompts):
        assert time.monotonic() < end, "the requests do not run together"
        time.sleep(0.05)
    return threads


def test_sigterm_under_load_ends_every_process(
    doomed: list[Server], prompts: list[list[int]]
) -> None:
    server = doomed[0]
    pids = family(server)
    threads = load(server, prompts[:8])
    assert all(thread.is_alive() for thread in threads), "the server has nothing in flight"
    os.kill(server.pid, signal.SIGTERM)
    left = wait_until_gone(pids, seconds=180)
    for thread in threads:
        thread.join()
    assert left == [], server.log()[-2000:]


def test_an_exception_in_the_worker_is_named_and_ends_the_server(
    doomed: list[Server], prompts: list[list[int]]
) -> None:
    """It must not hang: a supervisor must see that the server is gone, and its log must say why."""
    server = doomed[1]
    pids = family(server)
    with pytest.raises(requests.RequestException):
        server.generate(prompts[0], rid="raise-1", max_new_tokens=20)
    assert wait_until_gone(pids, seconds=180) == []
    assert server.wait_for_exit(10) != 0
    assert "RuntimeError: scripted failure" in server.log()
