"""A server on this machine, from start to stop; for the demo, the tests and the benchmarks.

Imports neither torch nor SGLang: benchmarks also start servers of a Python whose SGLang is another
release, where this package lies on the path and is not installed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import openai
import requests

# the checkout; programs that run beside an installed package know their own
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 420
NO_ANSWER = "the server did not answer in time"
PORTS = range(20000, 32000)
STOP_TIMEOUT_S = 3
IDLE_TIMEOUT_S = 60
# the ways in which SGLang can schedule DFLASH. OVERLAP is launch/cpu.sh's switch; on a GPU overlap
# is usual
SCHEDULES = {
    "in turn": {"SGLANG_ENABLE_DFLASH_SPEC_V2": "0"},
    "overlap": {"OVERLAP": "1"},
    "plan stream": {"OVERLAP": "1", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"},
}


def free_port() -> int:
    """Return a port for a server that binds it half a minute from now.

    Below those that the system gives to outgoing connections: one of them could take it till then.
    """
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ServerProcess:
    """A server and every process it starts, until `stop` or the end of this program."""

    def __init__(self, command: list[str], *, port: int, env: dict[str, str]) -> None:
        self.command = command
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.start_s: float | None = None
        with contextlib.suppress(requests.RequestException):
            requests.get(f"{self.url}/health", timeout=5)
            raise SystemExit(
                f"{self.url} is answered already, so this server would not be the one that is "
                "asked. Stop the server there first."
            )
        if threading.current_thread() is threading.main_thread():
            # `timeout` ends a program so: its servers must not outlive it
            signal.signal(signal.SIGTERM, _leave)
        # without a name, so that nothing is left of it
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHON": sys.executable, **env},
        )
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(
        self, on_wait: Callable[[], None] = lambda: None, *, timeout_s: float = START_TIMEOUT_S
    ) -> Self:
        """Return when the server answers, calling `on_wait` now and then; raise with the end of
        its log if it stops instead."""
        while time.monotonic() - self._began < timeout_s:
            on_wait()
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended at start-up:\n{self.log()[-4000:]}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=10).ok:
                    self.start_s = round(time.monotonic() - self._began, 1)
                    return self
            time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"{NO_ANSWER}:\n{self.log()[-4000:]}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_exit(self, timeout: float = START_TIMEOUT_S) -> int:
        return self._process.wait(timeout)

    def log(self) -> str:
        # at a place of its own: the server writes where the file's stands
        read = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)
        return read.decode(errors="replace").replace("\r", "\n")

    def info(self) -> dict[str, Any]:
        """Return /server_info: the arguments as SGLang resolved them, and the scheduler's state."""
        response = requests.get(f"{self.url}/server_info", timeout=60)
        response.raise_for_status()
        return response.json()

    def state(self) -> dict[str, Any]:
        """Return the scheduler's part of /server_info: the first replica's, with our DFLASH's
        counts summed over all of them."""
        info = self.info()
        state = info["internal_states"][0]
        if "sglang_dflash" in state:
            # here: benchmarks also ask servers of a Python that has no sglang_dflash
            from sglang_dflash.metrics import replicas_of, together

            state["sglang_dflash"] = together(replicas_of(info))
        return state

    def flush_cache(self) -> None:
        """Forget every prefix, once the server is idle."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while not requests.post(f"{self.url}/flush_cache", timeout=60).ok:
            if time.monotonic() > deadline:
                raise RuntimeError("the server does not become idle")
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server and every process it started. Its log stays readable."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        atexit.unregister(self.stop)


def _leave(*_: object) -> None:
    raise KeyboardInterrupt("stopped by a signal")


class Server(ServerProcess):
    """`with Server("--context-length", "256") as server:` serves until the block ends."""

    script = ROOT / "launch" / "cpu.sh"

    def __init__(self, *args: str, plain: bool = False, env: dict[str, str] | None = None) -> None:
        port = free_port()
        super().__init__(
            [str(self.script), *args, "--port", str(port)],
            port=port,
            # tiny models: a second thread costs more than it brings
            env={"PLAIN": str(int(plain)), "OMP_NUM_THREADS": "1", **(env or {})},
        )

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

    def acceptance(self) -> dict[str, Any]:
        """Return our meter's snapshot, over all replicas."""
        return self.state()["sglang_dflash"]["acceptance"]
