"""launch/client.py against a real server, as a user calls it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from sglang_dflash.testing.server import ROOT, Server

QUESTION = "Write the 8 times table up to 7."


def ask(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    # as a user types it, without http://
    command = [sys.executable, str(ROOT / "launch" / "client.py"), QUESTION]
    return subprocess.run(
        [*command, "--url", f"127.0.0.1:{server.port}", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.usual_schedule("in turn")
def test_client_needs_no_option(dflash: Server) -> None:
    """By default, answers may be as long as the server's context allows."""
    done = ask(dflash)
    assert done.returncode == 0, done.stderr
    assert re.search(r"accept length \d+\.\d\d: \d+ tokens in \d+ verify steps", done.stdout)


@pytest.mark.usual_schedule("in turn")
def test_what_the_server_refuses_is_one_sentence(dflash: Server) -> None:
    done = ask(dflash, "--max-tokens", "100000")
    assert done.returncode == 1
    assert done.stderr.startswith(f"http://127.0.0.1:{dflash.port} refused the request (HTTP 400)")
    assert len(done.stderr.splitlines()) == 1


def test_without_a_server_the_client_says_so() -> None:
    command = [sys.executable, str(ROOT / "launch" / "client.py"), QUESTION]
    done = subprocess.run(
        [*command, "--url", "127.0.0.1:1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr == "No server answers at http://127.0.0.1:1. Start one, or pass its --url.\n"
