"""A real Prometheus scrapes a real server, and every query of the dashboard returns data."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from sglang_dflash.testing.server import ROOT, Server, free_port

OBSERVABILITY = ROOT / "launch" / "observability"
QUERIES = {
    (panel["title"], target["refId"]): target["expr"]
    for panel in json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())["panels"]
    for target in panel["targets"]
}


def scrapes(port: int) -> int:
    """Return the number of scrapes stored in Prometheus."""
    url = f"http://127.0.0.1:{port}/api/v1/query"
    steps = '{__name__=~"sglang[:_]dflash_verify_steps_total"}'
    query = {"query": f"count_over_time({steps}[2m])"}
    try:
        result = requests.get(url, params=query, timeout=10).json()["data"]["result"]
    except requests.RequestException:
        return 0
    return max((int(series["value"][1]) for series in result), default=0)


@pytest.fixture(scope="module")
def prometheus(
    measured: Server, tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> Iterator[str]:
    if shutil.which("prometheus") is None:
        pytest.skip("needs the prometheus program (Debian: apt install prometheus)")
    folder: Path = tmp_path_factory.mktemp("prometheus")
    port = free_port()
    shipped = (OBSERVABILITY / "prometheus.yml").read_text()
    assert "127.0.0.1:30000" in shipped
    config = shipped.replace("127.0.0.1:30000", f"127.0.0.1:{measured.port}")
    (folder / "prometheus.yml").write_text(config.replace("interval: 5s", "interval: 3s"))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # load until every rate has its two samples; a busy CPU answers scrapes late
        end = time.monotonic() + 60
        while time.monotonic() < end and scrapes(port) < 4:
            measured.generate_all(prompts[:3], max_new_tokens=40)
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("query", QUERIES, ids=lambda key: " ".join(key))
def test_every_query_of_the_dashboard_returns_data(prometheus: str, query: tuple[str, str]) -> None:
    response = requests.get(
        f"{prometheus}/api/v1/query", params={"query": QUERIES[query]}, timeout=20
    )
    result = response.json()["data"]["result"]
    assert result, f"no data for {QUERIES[query]}"
    values = [float(series["value"][1]) for series in result]
    assert all(value == value for value in values), "NaN: a rate was divided by nothing"


def test_the_dashboard_agrees_with_the_server(prometheus: str) -> None:
    """The accept length reported by Prometheus is plausible."""
    response = requests.get(
        f"{prometheus}/api/v1/query",
        params={"query": QUERIES["Accept length", "A"]},
        timeout=20,
    )
    [series] = response.json()["data"]["result"]
    assert 1.0 <= float(series["value"][1]) <= 16.0
