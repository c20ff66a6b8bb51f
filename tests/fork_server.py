"""Fork servers from a process that has imported SGLang, which takes most of a start's CPU time.

A forked server loads its plug-ins after SGLang's modules, like the processes that SGLang spawns on
a GPU. tests/e2e/test_fork_server.py compares it with one that starts as users start it.

`start` stands in for subprocess.Popen. Run as a program, this file is the process that forks.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

import setproctitle

ROOT = Path(__file__).resolve().parents[1]
SERVER = "sglang.launch_server"
IMPORTED = ("sglang.srt.entrypoints.http_server", "sglang.srt.models.registry")
# start scripts run this instead of Python: it prints what they would start
RECORDER = ROOT / "tests" / "record_python.sh"
# variables that are read once plug-ins are loaded, or by the start script, or not at all
LATE = re.compile(
    "OVERLAP|PLAIN|PYTHON|PYTHONPATH|RECORDED_PYTHON|PYTEST_.*|_|PWD|OLDPWD|SHLVL|"
    "SGLANG_DFLASH|SGLANG_DFLASH_.*|SGLANG_ENABLE_DFLASH_SPEC_V2|"
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM|SGLANG_CPU_OMP_THREADS_BIND|SGLANG_HOST_IP|"
    # when ranks meet
    "GLOO_SOCKET_IFNAME|NCCL_.*|SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK|"
    # of tests/plugins
    "BOTH_FEATURES|NATIVE_OPS|PARTING|SCRIPT_FOLDER|WIDE_WEIGHTS|WIDTHS|WIRE"
)
MAX_MESSAGE = 1 << 20
POLL_S = 0.05


def start(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
    """Fork the server that a command is or becomes, or start what is not a server."""
    asked = _record(command, env)
    if asked is None:
        return subprocess.Popen(command, env=env, **options)
    early = frozenset(read_by_imports(asked["env"]).items())
    return Forked(_forker(early), asked, options["stdout"])


def read_by_imports(env: dict[str, str]) -> dict[str, str]:
    """Return the variables that must be the same in all servers of one process."""
    return {name: value for name, value in env.items() if not LATE.fullmatch(name)}


def _record(command: list[str], env: dict[str, str]) -> dict[str, Any] | None:
    # with more threads SGLang spawns its processes, which must not depend on ours
    if env.get("OMP_NUM_THREADS") != "1":
        return None
    if command[1:3] == ["-m", SERVER]:
        return {"arguments": command[3:], "env": env}
    if not Path(command[0]).is_relative_to(ROOT) or Path(command[0]).suffix != ".sh":
        return None
    recording = {**env, "PYTHON": str(RECORDER), "RECORDED_PYTHON": env["PYTHON"]}
    ran = subprocess.run(command, env=recording, capture_output=True, text=True)
    variables, _, words = ran.stdout.partition("\0\0")
    arguments = words.split("\0")[:-1]
    if ran.returncode != 0 or arguments[:2] != ["-m", SERVER]:
        return None
    found = dict(each.split("=", 1) for each in variables.split("\0"))
    return {"arguments": arguments[2:], "env": {**found, "PYTHON": env["PYTHON"]}}


class Forked:
    """The process of a forked server, with what is needed of subprocess.Popen."""

    def __init__(self, forker: Forker, asked: dict[str, Any], output: IO[bytes]) -> None:
        self._forker = forker
        self._code: int | None = None
        self.pid: int = forker.ask(asked, output)["pid"]
        forker.running.add(self.pid)

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._forker.ask({"poll": self.pid})["code"]
            if self._code is not None:
                self._forker.running.discard(self.pid)
        return self._code

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(SERVER, timeout)
            time.sleep(POLL_S)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class Forker:
    """A process that forks servers, until this program ends."""

    def __init__(self, env: dict[str, str]) -> None:
        self.running: set[int] = set()
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the owner, who then stops the servers
                start_new_session=True,
            )
        atexit.register(self.stop)

    def ask(self, request: dict[str, Any], output: IO[bytes] | None = None) -> dict[str, Any]:
        with self._lock:
            files = [] if output is None else [output.fileno()]
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            answer = self._channel.recv(MAX_MESSAGE)
        if not answer:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"the process that forks servers has ended:\n{said}")
        return json.loads(answer)

    def stop(self) -> None:
        self._channel.close()
        self._process.wait()


_forkers: dict[frozenset[tuple[str, str]], Forker] = {}


def _forker(early: frozenset[tuple[str, str]]) -> Forker:
    """Return the process whose imports have read these variables."""
    if early not in _forkers:
        # each has a gigabyte: those without a server end
        for other in [key for key, forker in _forkers.items() if not forker.running]:
            _forkers.pop(other).stop()
        # its own path: the servers of one process have different plug-ins
        _forkers[early] = Forker({**dict(early), "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    return _forkers[early]


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork until the channel closes; in a forked process, return what was asked."""
    while True:
        message, files, *_ = socket.recv_fds(channel, MAX_MESSAGE, 1)
        if not message:
            return None
        request = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        elif pid := os.fork():
            os.close(files[0])
            answer = {"pid": pid}
        else:
            channel.close()
            _become(request, files[0])
            return request
        channel.send(json.dumps(answer).encode())


def _become(request: dict[str, Any], output: int) -> None:
    """Give this process the session, output, environment and arguments of a server."""
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    entries = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    # the first one is the folder that `python -m` runs in
    sys.path[1:1] = [entry for entry in entries if entry and entry not in sys.path]
    sys.argv = [SERVER, *request["arguments"]]


def main() -> None:
    # it looks for the arguments beside the environment, whose first variable SGLang may set anew
    # when it is imported: then no process forked here could have a title
    setproctitle.getproctitle()
    for name in IMPORTED:
        importlib.import_module(name)
    if _serve(socket.socket(fileno=int(sys.argv[1]))):
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
