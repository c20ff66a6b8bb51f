"""Prometheus and Grafana beside a server: the script, and the files that it and compose share."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from sglang_dflash.testing.server import ROOT, free_port

FOLDER = ROOT / "launch" / "observability"
START = FOLDER / "start.py"
# takes Grafana's place: writes down how it was started, and says that it is healthy
GRAFANA = """#!{python}
import http.server, json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open(os.environ["GF_PATHS_DATA"] + ".json", "w"))
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
port = int(os.environ["GF_SERVER_HTTP_PORT"])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(b"sglang:dflash_verify_steps_total 7\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def target() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def value(port: int, query: str) -> str | None:
    """Return what Prometheus answers; None as long as it has nothing."""
    url = f"http://127.0.0.1:{port}/api/v1/query"
    try:
        found = requests.get(url, params={"query": query}, timeout=5).json()["data"]["result"]
    except requests.RequestException:
        return None
    return found[0]["value"][1] if found else None


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the prometheus program")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_the_script_watches_the_servers_it_is_given(
    target: str, tmp_path: Path, number: signal.Signals
) -> None:
    stand_in = tmp_path / "bin" / "grafana"
    stand_in.parent.mkdir()
    (tmp_path / "public").mkdir()
    stand_in.write_text(GRAFANA.format(python=sys.executable))
    stand_in.chmod(0o755)
    port, grafana_port = free_port(), free_port()
    ports = ["--prometheus-port", str(port), "--grafana-port", str(grafana_port)]
    process = subprocess.Popen(
        [sys.executable, START, "--targets", target, "--data", tmp_path / "data", *ports],
        env={**os.environ, "PATH": f"{stand_in.parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 90
        while value(port, "sglang:dflash_verify_steps_total") != "7":
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.5)
        assert value(port, f'up{{instance="{target}"}}') == "1"
        rules = requests.get(f"http://127.0.0.1:{port}/api/v1/rules", timeout=5).json()
        assert rules["data"]["groups"][0]["rules"]
        while not (tmp_path / "data" / "grafana.json").exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.2)
    finally:
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"Grafana: http://127.0.0.1:{grafana_port}" in out and "does not answer" not in out
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/-/ready", timeout=5)
    arguments, settings = json.loads((tmp_path / "data" / "grafana.json").read_text())
    assert arguments == ["server", "--homepath", str(tmp_path)]
    assert settings["PROMETHEUS_URL"] == f"http://127.0.0.1:{port}"
    assert Path(settings["GF_PATHS_PROVISIONING"], "datasources").is_dir()
    assert Path(settings["DASHBOARDS"], "grafana-dashboard.json").is_file()


def test_without_prometheus_the_script_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, START], env={**os.environ, "PATH": str(tmp_path)}, capture_output=True
    )
    assert done.returncode == 1 and b"apt install prometheus" in done.stderr


def test_a_url_is_not_a_target() -> None:
    done = subprocess.run(
        [sys.executable, START, "--targets", "http://127.0.0.1:30000"], capture_output=True
    )
    assert done.returncode == 2 and b"pass HOST:PORT, as in 127.0.0.1:30000" in done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the prometheus program")
def test_a_port_that_is_taken_is_refused(target: str) -> None:
    """The program that has it would be taken for ours."""
    port = target.partition(":")[2]
    done = subprocess.run(
        [sys.executable, START, "--prometheus-port", port], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"--prometheus-port {port} cannot be used: Address already in use. Pass" in done.stderr


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_containers_get_the_files_that_are_here() -> None:
    services = read(FOLDER / "compose.yml")["services"]
    volumes = [each for service in services.values() for each in service["volumes"]]
    mounted = [each.split(":")[0] for each in volumes if each.startswith("./")]
    assert mounted and all((FOLDER / name).exists() for name in mounted)
    # both ways to start Grafana set what its files ask for
    files = list((FOLDER / "provisioning").rglob("*.yml"))
    asked = {word for path in files for word in path.read_text().split() if word.startswith("$")}
    assert asked == {"$PROMETHEUS_URL", "$DASHBOARDS"}
    assert {word[1:] for word in asked} <= set(services["grafana"]["environment"])
    [source] = read(FOLDER / "provisioning/datasources/prometheus.yml")["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
