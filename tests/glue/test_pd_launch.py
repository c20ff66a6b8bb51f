"""launch/pd.sh: what it would start, and that its servers and its router end together."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_dflash.testing.server import free_port
from tests.glue.test_launch import LAUNCH, run

# a recipe that answers as its server would, and ends when it is told to
RECIPE = f"""#!{sys.executable}
import http.server, json, pathlib, sys, threading, time

words = sys.argv[1:]
given = dict(zip(words, words[1:]))
mode = given["--disaggregation-mode"]
folder = pathlib.Path(words[0])
(folder / mode).write_text(json.dumps(words))
info = {{
    "version": "0.5.23",
    "model_path": "M",
    "disaggregation_mode": mode,
    "disaggregation_bootstrap_port": int(given["--disaggregation-bootstrap-port"]),
    "internal_states": [{{}}],
}}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(info).encode())


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not (folder / f"end-{{mode}}").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe"
    path.write_text(RECIPE)
    path.chmod(0o755)
    return path


def test_both_servers_and_the_router_are_shown() -> None:
    asked = {"TP": "2", "PORT": "31000", "DECODE_ARGS": "--max-running-requests 8"}
    shown = run("pd.sh", str(LAUNCH / "qwen3-8b.sh"), "--host", "a b", **asked)
    assert shown.returncode == 0, shown.stderr
    prefill, decode, router = (shlex.split(line) for line in shown.stdout.splitlines())
    meeting = ["--disaggregation-bootstrap-port", "8998"]
    recipe = [str(LAUNCH / "qwen3-8b.sh"), "--host", "a b", "--port"]
    assert prefill == [*recipe, "31001", "--disaggregation-mode", "prefill", *meeting]
    # the prefill server has the first two GPUs
    own = ["--base-gpu-id", "2", "--max-running-requests", "8"]
    assert decode == [*recipe, "31002", "--disaggregation-mode", "decode", *meeting, *own]
    urls = ["prefill=http://127.0.0.1:31001,8998", "decode=http://127.0.0.1:31002"]
    assert router == [str(LAUNCH / "router.sh"), *urls, "--port", "31000"]


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ([], {}, "needs a recipe, such as launch/qwen3-8b.sh"),
        (["/nowhere.sh"], {}, "and found /nowhere.sh."),
        (["true"], {"DP": "2"}, "found DP=2 NODES=1"),
        (["true"], {"TP": "two"}, "TP=two is not a number"),
    ],
    ids=["nothing", "no recipe", "replicas", "no number"],
)
def test_what_cannot_be_started_is_refused(
    arguments: list[str], env: dict[str, str], message: str
) -> None:
    shown = run("pd.sh", *arguments, **env)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("ends", ["decode", "the user"])
def test_if_one_ends_all_do(recipe: Path, tmp_path: Path, ends: str) -> None:
    """With its real router, once both servers answer."""
    # the two servers take those behind it
    port = free_port(3)
    process = subprocess.Popen(
        [str(LAUNCH / "pd.sh"), str(recipe), str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PORT": str(port)}
        | {"ROUTER_ARGS": f"--host 127.0.0.1 --prometheus-port {free_port()}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # its router imports SGLang
        deadline = time.monotonic() + 240
        while not answers(port):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        if ends == "decode":
            (tmp_path / "end-decode").touch()
        else:
            process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=120)
    finally:
        for mode in ("prefill", "decode"):
            (tmp_path / f"end-{mode}").touch()
        process.kill()
    sentence = "launch/pd.sh: the decode server has ended, so the others are stopped, too."
    assert (sentence in told) == (ends == "decode"), told
    assert process.returncode == (1 if ends == "decode" else 143)
    assert not any(answers(each) for each in (port, port + 1, port + 2))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
