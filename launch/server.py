"""A server on this machine, started by launch/cpu.sh; for the demo and the tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import openai
import requests

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 300
PORTS = range(20000, 32000)
STOP_TIMEOUT_S = 3


def free_port() -> int:
    """Return a port for a server that binds it half a minute from now.

    Below those that the system gives to outgoing connections: one of them could take it till then.
    """
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """`with Server("--context-length", "256") as server:` serves until the block ends."""

    script = ROOT / "launch" / "cpu.sh"

    def __init__(self, *args: str, plain: bool = False, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        handle, name = tempfile.mkstemp(prefix="sglang-dflash-", suffix=".log")
        self._log = Path(name)
        self._process = subprocess.Popen(
            [str(self.script), *args, "--port", str(self.port)],
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHON": sys.executable,
                "PLAIN": str(int(plain)),
                # tiny models: a second thread costs more than it brings
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
        )
        os.close(handle)

    def __enter__(self) -> Server:
        return self.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait(self, on_wait: Callable[[], None] = lambda: None) -> Server:
        """Return when the server answers, calling `on_wait` now and then; raise with the end of
        its log if it stops instead."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            on_wait()
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended at start-up:\n{self.log()[-4000:]}")
            try:
                if requests.get(f"{self.url}/health", timeout=10).ok:
                    return self
            except requests.RequestException:
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"the server did not answer in time:\n{self.log()[-4000:]}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_exit(self, timeout: float = START_TIMEOUT_S) -> int:
        return self._process.wait(timeout)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End the server and every process it started. Its log stays readable."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300)

    def generate(
        self, input_ids: list[int], *, rid: str | None = None, **sampling_params: Any
    ) -> dict[str, Any]:
        """Ask SGLang's own endpoint, greedy unless told otherwise; return its whole answer."""
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0, **sampling_params},
        }
        if rid is not None:
            body["rid"] = rid
        response = requests.post(f"{self.url}/generate", json=body, timeout=300)
        if not response.ok:
            raise RuntimeError(f"HTTP {response.status_code}: {response.text}")
        return response.json()

    def generate_all(
        self, prompts: list[list[int]], *, rids: list[str] | None = None, **sampling_params: Any
    ) -> list[dict[str, Any]]:
        """Ask for all prompts at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(
                pool.map(
                    lambda ids, rid: self.generate(ids, rid=rid, **sampling_params),
                    prompts,
                    rids or [None] * len(prompts),
                )
            )

    def state(self) -> dict[str, Any]:
        response = requests.get(f"{self.url}/server_info", timeout=60)
        response.raise_for_status()
        return response.json()["internal_states"][0]

    def acceptance(self) -> dict[str, Any]:
        """Return our meter's snapshot."""
        return self.state()["sglang_dflash"]["acceptance"]
