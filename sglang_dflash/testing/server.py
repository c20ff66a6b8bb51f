"""Start, query and stop a local server; for the demo, the tests and the benchmarks.

Imports neither torch nor SGLang: benchmarks also start servers under a Python with another SGLang
release, where this package is on the path but not installed.
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
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import openai
import requests

# root of the checkout; programs run with an installed package resolve their own paths
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 420
NO_ANSWER = "the server did not answer in time"
# below those from which SGLang draws further ports, 22000 to 29999
PORTS = range(10000, 22000)
# so many ports are reserved at a time, each by an open file, and the oldest is given up for another
MOST_RESERVED = 64
_reservations: deque[socket.socket] = deque()
STOP_TIMEOUT_S = 3
IDLE_TIMEOUT_S = 60
# SGLang's scheduling modes for DFLASH. OVERLAP is launch/cpu.sh's switch; on a GPU overlap is the
# default
SCHEDULES = {
    "in turn": {"SGLANG_ENABLE_DFLASH_SPEC_V2": "0"},
    "overlap": {"OVERLAP": "1"},
    "plan stream": {"OVERLAP": "1", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"},
}


def free_port(count: int = 1) -> int:
    """Return a free port, the first of `count`, for a server that binds it half a minute later.

    It is below the ephemeral range, where an outgoing connection could take it in the meantime, and
    no other process draws it, nor this one, while it is among the last that this one has drawn.
    """
    while True:
        first = random.SystemRandom().choice(PORTS)
        if all(map(_reserve, range(first, first + count))):
            return first


def _reserve(port: int) -> bool:
    """Return whether a port is free and nobody has reserved it, and reserve it then."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        # a name without a file, of which the kernel gives each only once
        reservation.bind(f"\0sglang_dflash port {port}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        reservation.close()
        return False
    _reservations.append(reservation)
    if len(_reservations) > MOST_RESERVED:
        _reservations.popleft().close()
    return True


class ServerProcess:
    """A server and all its child processes, running until `stop` or the end of this program."""

    # tests fork servers from one process (tests/fork_server.py)
    popen: Callable[..., Any] = subprocess.Popen

    def __init__(self, command: list[str], *, port: int, env: dict[str, str]) -> None:
        self.command = command
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.start_s: float | None = None
        with contextlib.suppress(requests.RequestException):
            requests.get(f"{self.url}/health", timeout=5)
            raise SystemExit(
                f"Another server already answers at {self.url} and would get this one's requests. "
                "Stop it first."
            )
        if threading.current_thread() is threading.main_thread():
            # `timeout` sends SIGTERM: the servers must not outlive this program
            signal.signal(signal.SIGTERM, _leave)
        # unnamed, so that no file is left behind
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._began = time.monotonic()
        self._process = self.popen(
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
        """Wait until the server answers, calling `on_wait` between polls; raise RuntimeError with
        the tail of its log if it exits or times out."""
        while time.monotonic() - self._began < timeout_s:
            on_wait()
            if self._process.poll() is not None:
                raise RuntimeError(f"the server exited during start-up:\n{self.log()[-4000:]}")
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
        # pread, because the server writes at the shared file offset
        read = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)
        return read.decode(errors="replace").replace("\r", "\n")

    def info(self) -> dict[str, Any]:
        """Return /server_info: the arguments as SGLang resolved them, and the scheduler's state."""
        response = requests.get(f"{self.url}/server_info", timeout=60)
        response.raise_for_status()
        return response.json()

    def state(self) -> dict[str, Any]:
        """Return the scheduler state from /server_info: the first replica's, with our DFLASH
        counters summed over all replicas."""
        info = self.info()
        state = info["internal_states"][0]
        if "sglang_dflash" in state:
            # local import: benchmarks also query servers of a Python without sglang_dflash
            from sglang_dflash.metrics import replicas_of, together

            state["sglang_dflash"] = together(replicas_of(info))
        return state

    def flush_cache(self) -> None:
        """Flush the prefix cache, waiting until the server is idle."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while not requests.post(f"{self.url}/flush_cache", timeout=60).ok:
            if time.monotonic() > deadline:
                raise RuntimeError("the server did not become idle")
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop the server and all its child processes. Its log stays readable."""
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
            # tiny models: a second thread costs more than it gains
            env={"PLAIN": str(int(plain)), "OMP_NUM_THREADS": "1", **(env or {})},
        )

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300)

    def generate(
        self,
        input_ids: list[int],
        *,
        rid: str | None = None,
        fields: Mapping[str, Any] | None = None,
        **sampling_params: Any,
    ) -> dict[str, Any]:
        """Query SGLang's native /generate, greedy by default; return the full response. `fields`
        are further ones of the request."""
        body: dict[str, Any] = {
            **(fields or {}),
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
        """Send all prompts concurrently."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(
                pool.map(
                    lambda ids, rid: self.generate(ids, rid=rid, **sampling_params),
                    prompts,
                    rids or [None] * len(prompts),
                )
            )

    def acceptance(self) -> dict[str, Any]:
        """Return our acceptance counters, over all replicas."""
        return self.state()["sglang_dflash"]["acceptance"]
