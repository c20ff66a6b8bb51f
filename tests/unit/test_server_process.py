"""The server harness with a command that is not a server, and what importing it requires."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sglang_dflash.testing.server import ROOT, ServerProcess, free_port


def test_a_server_that_ends_is_reported_with_its_log_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    says = "print('loading 1%\\rloading 2%'); print('no such model'); raise SystemExit(3)"
    server = ServerProcess([sys.executable, "-c", says], port=free_port(), env={})
    with pytest.raises(RuntimeError, match="start-up:\nloading 1%\nloading 2%\nno such model"):
        server.wait(timeout_s=60)
    assert list(tmp_path.iterdir()) == []


def test_no_port_is_drawn_twice_whoever_draws() -> None:
    """A server binds it half a minute later, and another process could draw it until then."""
    first = free_port(3)
    draw = (
        "from sglang_dflash.testing import server\n"
        f"server.PORTS = range({first}, {first + 53})\n"
        "print(*(server.free_port() for _ in range(30)))"
    )
    ran = subprocess.run([sys.executable, "-c", draw], cwd=ROOT, capture_output=True, text=True)
    drawn = set(map(int, ran.stdout.split()))
    assert len(drawn) == 30, ran.stderr
    assert min(drawn) >= first + 3


def test_the_log_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    go = tmp_path / "go"
    says = (
        "import pathlib, time\n"
        "print('first', flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "print('second', flush=True)\n"
    )
    server = ServerProcess([sys.executable, "-c", says], port=free_port(), env={})
    deadline = time.monotonic() + 60
    while server.log() != "first\n":
        assert time.monotonic() < deadline, server.log()
    go.touch()
    assert server.wait_for_exit(60) == 0
    assert server.log() == "first\nsecond\n"
    server.stop()


def test_the_harness_needs_neither_torch_nor_sglang() -> None:
    """Benchmarks use it to start servers of another release, in a Python that may lack both."""
    program = (
        "import sys; sys.modules.update(torch=None, sglang=None);"
        "import sglang_dflash.testing.server, sglang_dflash.testing.stream;"
        "print(*sorted(name for name in sys.modules if name.startswith('sglang_dflash.')))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    harness = ["sglang_dflash.testing", "sglang_dflash.testing.server"]
    assert ran.stdout.split() == [*harness, "sglang_dflash.testing.stream"]
