"""Prometheus and Grafana beside a server: the script, and the files that it and compose share."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from launch.observability import start
from sglang_dflash.testing.server import free_port
from tests.dashboard import OBSERVABILITY, PANELS, filled

START = OBSERVABILITY / "start.py"
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
        found = requests.get(url, params={"query": query}, timeout=30).json()["data"]["result"]
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
    told: list[str] = []
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
        rules = requests.get(f"http://127.0.0.1:{port}/api/v1/rules", timeout=30).json()
        assert rules["data"]["groups"][0]["rules"]
        # its last line says that all programs answer
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line)
            if "Ctrl-C ends it." in line:
                break
    finally:
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
    out = "".join([*told, rest])
    assert process.returncode == 128 + number
    assert f"Grafana: http://127.0.0.1:{grafana_port}" in out and "does not answer" not in out
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/-/ready", timeout=5)
    arguments, settings = json.loads((tmp_path / "data" / "grafana.json").read_text())
    assert arguments == ["server", "--homepath", str(tmp_path)]
    assert settings["PROMETHEUS_URL"] == f"http://127.0.0.1:{port}"
    assert Path(settings["GF_PATHS_PROVISIONING"], "datasources").is_dir()
    assert Path(settings["DASHBOARDS"], "grafana-dashboard.json").is_file()


def test_ctrl_c_while_a_program_starts_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a session of its own, so it would stay, and keep its port."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    program = start.Program("slow", ["sleep", "600"], ready="http://127.0.0.1:9", data=tmp_path)
    monkeypatch.setattr(start.urllib.request, "urlopen", interrupt)
    with pytest.raises(KeyboardInterrupt), program:
        pass
    assert not program.is_running


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
    services = read(OBSERVABILITY / "compose.yml")["services"]
    volumes = [each for service in services.values() for each in service["volumes"]]
    mounted = [each.split(":")[0] for each in volumes if each.startswith("./")]
    assert mounted and all((OBSERVABILITY / name).exists() for name in mounted)
    # both ways to start Grafana set what its files ask for
    paths = list((OBSERVABILITY / "provisioning").rglob("*.yml"))
    asked = {word for path in paths for word in path.read_text().split() if word.startswith("$")}
    assert asked == {"$PROMETHEUS_URL", "$DASHBOARDS"}
    assert {word[1:] for word in asked} <= set(services["grafana"]["environment"])
    [source] = read(OBSERVABILITY / "provisioning/datasources/prometheus.yml")["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]


QUERIES = [(panel, target) for panel in PANELS for target in panel["targets"]]
AGGREGATE = re.compile(r"\b(?:sum|avg)\b(?: by \(([\w, ]*)\))?")
METRIC = re.compile(r"sglang\[:_\](\w+)")
SERVER = {"model_name", "instance"}


def is_heatmap(panel: dict[str, Any]) -> bool:
    """It draws one histogram, so it cannot tell models apart: it is repeated instead."""
    return panel["type"] == "heatmap"


def test_every_served_model_has_its_own_lines() -> None:
    """With "All" chosen, the accept length of two models together would be that of neither."""
    for panel, target in QUERIES:
        groups = AGGREGATE.findall(target["expr"])
        by_instance = panel.get("repeat") == "instance" and "$instance" in panel["title"]
        assert groups, target["expr"]
        if is_heatmap(panel):
            assert by_instance and target["format"] == "heatmap"
            continue
        assert all(set(group.split(", ")) >= SERVER for group in groups), target["expr"]
        assert "scalar(" not in target["expr"]
        # what differs between the lines of a panel is in their names
        lines = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        told = lines | ({"instance"} if by_instance else set())
        assert told == {name for group in groups for name in group.split(", ")} - {"le"}


def test_ranges_follow_the_scrapes_and_the_zoom() -> None:
    """A fixed range skips samples where the picture spans days."""
    ranges = [span for _, each in QUERIES for span in re.findall(r"\[([^:\]]+)\]", each["expr"])]
    assert set(ranges) == {"$__rate_interval"}
    assert sum(each["expr"].count("rate(") for _, each in QUERIES) == len(ranges)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of prometheus")
def test_two_models_are_never_one_line(tmp_path: Path) -> None:
    """Every query is run on two servers, of two replicas each."""
    every = 'position="1",stage="verify",width="1"'
    bounds = ("1", "+Inf")
    servers = [f'model_name="{name}",instance="{name}:1"' for name in ("one", "other")]
    series = [
        {"series": f'sglang:{metric}{{{server},dp_rank="{rank}",{every},le="{le}"}}', "values": go}
        for metric in sorted({name for _, each in QUERIES for name in METRIC.findall(each["expr"])})
        for server, go in zip(servers, ("0+60x40", "0+30x40"), strict=True)
        for rank in range(2)
        for le in bounds
    ]
    cases = []
    for panel, target in QUERIES:
        lines = 1 if is_heatmap(panel) else len(servers)
        expected = [{"labels": "{}", "value": lines}]
        # so a line without these labels counts as one of all servers
        count = f"count(count by (model_name, instance) ({filled(target['expr'])}))"
        cases.append({"expr": count, "eval_time": "9m", "exp_samples": expected})
    test = {"interval": "15s", "input_series": series, "promql_expr_test": cases}
    (tmp_path / "case.yml").write_text(json.dumps({"tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "case.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_lines_have_the_colours_of_the_live_page() -> None:
    page = files("sglang_dflash.commands").joinpath("live.html").read_text()
    light = page.partition(":root {")[2].partition("}")[0]
    colours = dict(re.findall(r"--(\w+): (#\w+)", light))
    fields = {panel["title"]: panel["fieldConfig"] for panel in PANELS}

    def lines(title: str) -> list[str]:
        found = [each["properties"][0]["value"] for each in fields[title]["overrides"]]
        found = found or [fields[title]["defaults"]["color"]]
        # shades of one colour keep the servers apart
        assert all(each["mode"] == "shades" for each in found)
        return [each["fixedColor"] for each in found]

    def named(*names: str) -> list[str]:
        return [colours[name] for name in names]

    assert lines("Accept length") == lines("SGLang's own accept length") == named("accept")
    widths = lines("Verify width, tokens expected and committed per step")
    assert widths == named("width", "accept", "quiet")
    assert lines("Tokens per second") == named("speed", "draft", "accept")
    assert lines("Time of a step by stage") == named("draft", "verify", "commit")
    assert lines("Verify time per row") == named("verify")
    steps = fields["Low-acceptance alarms"]["defaults"]["thresholds"]["steps"]
    assert [each["color"] for each in steps] == named("speed", "alarm")
