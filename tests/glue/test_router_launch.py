"""launch/router.sh: what it would run, and which replicas it refuses."""

from __future__ import annotations

import http.server
import json
import shlex
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
    return {
        "version": "0.5.23",
        "model_path": "M",
        "disaggregation_mode": "null",
        "disaggregation_bootstrap_port": 8998,
        "internal_states": [{"sglang_dflash": state}],
    }


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


def test_servers_that_prefill_and_decode_are_named_to_the_router() -> None:
    servers = ("prefill=http://a:30000/", "prefill=http://b:30000,9000", "decode=http://c:30000/")
    shown = run("router.sh", *servers, "--port", "31000")
    assert shown.returncode == 0, shown.stderr
    told = " ".join(shown.stdout.split()[3:])
    assert told.startswith(
        "--pd-disaggregation --prefill http://a:30000 8998 --prefill http://b:30000 9000 "
        "--decode http://c:30000 --port 30000 --policy cache_aware"
    )
    # as the router reads them
    from sglang_router.launch_router import parse_router_args

    found = parse_router_args(shlex.split(told))
    assert found.pd_disaggregation and found.port == 31000
    assert found.prefill_urls == [("http://a:30000", 8998), ("http://b:30000", 9000)]
    assert found.decode_urls == ["http://c:30000"]


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ([], "needs the URL of each replica"),
        (["prefill=http://a"], "and found one kind"),
        (["decode=http://a"], "and found one kind"),
        (["prefill=http://a", "http://b"], "http://b is named without prefill= or decode="),
    ],
    ids=["none", "prefill", "decode", "mixed"],
)
def test_a_router_without_the_servers_it_needs_is_refused(servers: list[str], message: str) -> None:
    shown = run("router.sh", *servers, "--port", "31000")
    assert shown.returncode == 2
    assert message in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("named", "mode", "message"),
    [
        ("{}", "decode", "{0} has --disaggregation-mode decode. Name it decode={0}, or restart"),
        ("prefill={}", "null", "{0} has --disaggregation-mode null. Name it {0}, or restart"),
        ("decode={}", "prefill", "{0} has --disaggregation-mode prefill. Name it prefill={0}, or"),
        (
            "prefill={},9000",
            "prefill",
            "{0} has --disaggregation-bootstrap-port 8998, not 9000. Name it prefill={0},8998.",
        ),
        ("prefill={},x", "prefill", "prefill={0},x names no bootstrap port. Pass prefill=URL,PORT"),
    ],
    ids=["replica", "prefill", "decode", "port", "no port"],
)
def test_a_server_in_another_role_is_refused_in_one_sentence(
    serve: Serve, named: str, mode: str, message: str
) -> None:
    """A request would wait for KV that nobody sends."""
    url = serve(info() | {"disaggregation_mode": mode})
    other = serve(info() | {"disaggregation_mode": "decode"})
    servers = [named.format(url)]
    if named != "{}":
        kind = "prefill" if named.startswith("decode") else "decode"
        servers.append(f"{kind}={other}")
    done = run("router.sh", *servers, DRY_RUN="0")
    assert done.returncode == 1
    assert message.format(url) in done.stderr
    assert len(done.stderr.splitlines()) == 1


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
