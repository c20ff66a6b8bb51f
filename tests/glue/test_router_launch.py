"""launch/router.sh: what it would run, and which replicas it refuses."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.testing.server import free_port
from tests.glue.test_launch import run

Serve = Callable[..., str]


def info(**ours: Any) -> dict[str, Any]:
    """Return the /server_info of a replica."""
    state = {"dp_rank": 0, "version": "0.1.0", "drafter": "D", "block_size": 16, **ours}
    return {"version": "0.5.23", "model_path": "M", "internal_states": [{"sglang_dflash": state}]}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that serves a /server_info at a URL, until the test ends."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(found: dict[str, Any], status: int = 200) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_: object) -> None:
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_router_gets_the_replicas_and_what_was_passed_on() -> None:
    shown = run("router.sh", "http://a:30000/", "http://b:30000", "--policy", "round_robin")
    assert shown.returncode == 0, shown.stderr
    words = shown.stdout.split()
    assert words[1:4] == ["-m", "sglang_router.launch_router", "--worker-urls"]
    assert words[4:8] == ["http://a:30000", "http://b:30000", "--port", "30000"]
    assert words.index("cache_aware") < words.index("round_robin"), "the last one counts"


def test_a_router_without_replicas_is_refused() -> None:
    shown = run("router.sh", "--port", "31000")
    assert shown.returncode == 2
    assert "needs the URL of each replica" in shown.stderr


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (info(version="0.2.0"), "in their sglang_dflash: {0} has 0.1.0, {1} has 0.2.0. Restart"),
        (
            {"version": "0.5.23", "model_path": "M", "internal_states": [{}]},
            "in their sglang_dflash: {0} has 0.1.0, {1} has none. Restart",
        ),
        (info() | {"version": "0.5.17"}, "in their SGLang: {0} has 0.5.23, {1} has 0.5.17. "),
        (info() | {"model_path": "N"}, "in their target: {0} has M, {1} has N. "),
        (info(block_size=8), "in their block size: {0} has 16, {1} has 8. "),
    ],
    ids=["release", "plain", "SGLang", "target", "block size"],
)
def test_replicas_that_differ_are_refused_in_one_sentence(
    serve: Serve, other: dict[str, Any], message: str
) -> None:
    urls = serve(info()), serve(other)
    done = run("router.sh", *urls, DRY_RUN="0")
    assert done.returncode == 1
    assert f"The replicas differ {message.format(*urls)}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_replica_that_does_not_answer_is_named(serve: Serve) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    done = run("router.sh", serve(info()), gone, DRY_RUN="0")
    assert (done.returncode, done.stderr) == (
        1,
        f"No server answers at {gone}. Start it before the router, or leave it out.\n",
    )
    other = serve({}, status=404)
    done = run("router.sh", other, DRY_RUN="0")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{other} does not say what it runs (HTTPError('404")
    assert len(done.stderr.splitlines()) == 1


def test_a_python_without_the_router_is_told_in_one_sentence(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    # no site-packages, but PYTHONPATH
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = run("router.sh", "http://127.0.0.1:1", DRY_RUN="0", PYTHON=str(bare), PYTHONPATH="")
    assert done.returncode == 1
    assert "has no requests and no sglang_router. Install what is missing (pip" in done.stderr
    assert len(done.stderr.splitlines()) == 1
