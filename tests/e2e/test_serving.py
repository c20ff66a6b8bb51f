"""benchmarks/serving.py as a user runs it, on the embedded pair."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import torch

from sglang_dflash.testing.server import ROOT, free_port
from tests import programs
from tests.programs import Ended

PAIR = ROOT / "sglang_dflash" / "pairs" / "tiny"


LOAD = ("--model-path", str(PAIR / "target"), "--draft-model-path", str(PAIR / "drafter"))
LOAD += ("--requests", "1", "3", "--contexts", "32", "--lengths", "8", "300", "--tries", "2", "4")
LOAD += ("--sleep-on-idle",)


def run(*words: object) -> Ended:
    return programs.run("benchmarks.serving", *words, *LOAD, folder=ROOT)


def test_systems_are_measured_and_compared_and_a_cut_run_is_taken_up(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("equal to the last token in fp32, which this benchmark does not serve on a GPU")
    out, port = tmp_path / "out", free_port()
    arguments = ("--systems", "plain", "ours", "--port", port, "--out", out)
    ran = run(*arguments)
    assert ran.status == 0, ran.output
    found = json.loads(out.with_suffix(".json").read_text())
    assert set(found["results"]) == {"plain", "ours"}
    assert found["agreement_with_plain"] == {
        "ours, 1 requests of 32": "1 of 1 equal",
        "ours, 3 requests of 32": "3 of 3 equal",
    }
    for result in found["results"].values():
        assert [p["requests"] for p in result["points"]] == [1, 3]
        assert all(p["tokens_per_s"] > 0 for p in result["points"])

    # as if interrupted during our last batch: only that one is measured again, and still compared
    del found["results"]["ours"]["points"][1]
    found["results"]["ours"]["error"] = "connection refused"
    for result in found["results"].values():
        result["points"][0]["tokens_per_s"] = 12345.0
    out.with_suffix(".json").write_text(json.dumps(found))
    ran = run(*arguments)
    assert ran.status == 0, ran.output
    again = json.loads(out.with_suffix(".json").read_text())
    assert again["results"]["plain"] == found["results"]["plain"]
    ours = again["results"]["ours"]
    assert "error" not in ours
    assert [p["requests"] for p in ours["points"]] == [1, 3]
    assert ours["points"][0] == found["results"]["ours"]["points"][0]
    assert again["agreement_with_plain"]["ours, 3 requests of 32"] == "3 of 3 equal"

    # results of another command must not be mixed with these
    ran = run("--systems", "plain", "--port", port, "--out", out)
    assert ran.status != 0
    assert "command differ" in ran.output


def test_a_server_that_is_there_already_is_not_measured() -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    port = free_port()
    other = HTTPServer(("127.0.0.1", port), Answer)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        ran = run("--systems", "plain", "--port", port)
    finally:
        other.shutdown()
    assert ran.status != 0
    assert "Another server already answers at" in ran.output


def test_a_stopped_benchmark_takes_its_server_with_it() -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving",
        "--systems",
        "plain",
        "--port",
        str(port),
    ]
    benchmark = subprocess.Popen([*command, "--port", str(port), *LOAD], cwd=ROOT)
    try:
        assert wait_for(lambda: servers_at(port)), "no server was started"
        # seen from its first moment on, in which the benchmark may not know it yet
        time.sleep(1)
        benchmark.terminate()
        assert benchmark.wait(60) != 0
        assert wait_for(lambda: not servers_at(port)), "the server is still there"
    finally:
        benchmark.kill()


def servers_at(port: int) -> list[psutil.Process]:
    """Return the live processes that were started to serve at a port, except benchmarks."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        serves = "--port" in line and str(port) in line and "benchmarks.serving" not in line
        if serves and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_for(condition: Callable[[], object], seconds: float = 180) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(condition())
