"""A real Prometheus scrapes a real server, and every query of the dashboard returns data."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from sglang_dflash.metrics import JUDGED_WIDTH
from sglang_dflash.testing.server import Server, free_port
from tests.dashboard import DASHBOARD, OBSERVABILITY, PANELS, filled

QUERIES = {
    (panel["title"], target["refId"]): filled(target["expr"])
    for panel in PANELS
    for target in panel["targets"]
}


def values(prometheus: str, query: str) -> list[float]:
    """Return what Prometheus answers for each series."""
    response = requests.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=20)
    return [float(series["value"][1]) for series in response.json()["data"]["result"]]


def scrapes(prometheus: str) -> float:
    """Return the number of scrapes stored in Prometheus."""
    steps = '{__name__=~"sglang[:_]dflash_verify_steps_total"}'
    try:
        return max(values(prometheus, f"count_over_time({steps}[2m])"), default=0)
    except requests.RequestException:
        return 0


def is_known(found: list[float]) -> bool:
    """Return whether there is data, and no rate was divided by nothing, which gives NaN."""
    return bool(found) and not any(map(math.isnan, found))


def stream(server: Server, prompt: list[int]) -> None:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 40}, "stream": True}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as response:
        assert list(response.iter_lines())[-2:], "an answer that has ended"


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
    shutil.copy(OBSERVABILITY / "alerts.yml", folder)
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
        end = time.monotonic() + 180
        url = f"http://127.0.0.1:{port}"
        while time.monotonic() < end and (
            scrapes(url) < 4 or not all(is_known(values(url, q)) for q in QUERIES.values())
        ):
            measured.generate_all(prompts[:3], max_new_tokens=40)
            # only a streamed answer has a time between tokens
            stream(measured, prompts[3])
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("query", QUERIES, ids=lambda key: " ".join(key))
def test_every_query_of_the_dashboard_returns_data(prometheus: str, query: tuple[str, str]) -> None:
    assert is_known(values(prometheus, QUERIES[query])), QUERIES[query]


def test_the_dashboard_agrees_with_the_server(prometheus: str) -> None:
    """The accept length reported by Prometheus is plausible."""
    [accept_length] = values(prometheus, QUERIES["Accept length", "A"])
    assert 1.0 <= accept_length <= 16.0


@pytest.mark.parametrize("name", ["model", "instance"])
def test_the_variables_of_the_dashboard_have_choices(prometheus: str, name: str) -> None:
    """A replica has a label only where there are several."""
    [variable] = [each for each in DASHBOARD["templating"]["list"] if each["name"] == name]
    found = re.fullmatch(r"label_values\((\{.*\}), (\w+)\)", variable["query"]["query"])
    assert found is not None
    response = requests.get(
        f"{prometheus}/api/v1/label/{found[2]}/values",
        params={"match[]": filled(found[1])},
        timeout=20,
    )
    assert len(response.json()["data"]) == 1


def test_every_panel_says_what_it_shows() -> None:
    assert all(panel["description"] for panel in PANELS)


ALERTS = {
    "SGLangServerDown": ('up{job="sglang",instance="a"}', "0x30"),
    "DFlashAcceptanceAlarm": ('sglang:dflash_alarms_total{instance="a"}', "0x25 1x5"),
    "SGLangRequestsWait": ('sglang_num_queue_reqs{instance="a"}', "3x30"),
}
STEPS = ('sglang:dflash_verify_steps_total{instance="a"}', "0+100x30")
COMMITTED = 'sglang:dflash_committed_tokens_total{instance="a"}'
VERIFIED = 'sglang:dflash_verified_rows_total{instance="a"}'


def firing(folder: Path, name: str, series: list[tuple[str, str]]) -> bool:
    """Return whether an alert fires after half an hour of these series, one sample a minute."""
    shutil.copy(OBSERVABILITY / "alerts.yml", folder)
    inputs = [{"series": of, "values": values} for of, values in series]
    query = {"expr": f'ALERTS{{alertname="{name}",alertstate="firing"}} * 0', "eval_time": "29m"}
    case = {"interval": "1m", "input_series": inputs, "promql_expr_test": [query]}
    # JSON is YAML; the query is expected to find nothing
    (folder / "case.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [case]}))
    tested = subprocess.run(
        ["promtool", "test", "rules", "case.yml"], cwd=folder, capture_output=True, text=True
    )
    assert tested.returncode == 0 or "exp: nil" in tested.stderr, tested.stderr
    return tested.returncode != 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of prometheus")
def test_alerts_fire_for_what_they_name_only(tmp_path: Path) -> None:
    for name, series in ALERTS.items():
        assert firing(tmp_path, name, [series]), name
        quiet = [(of, "1x30" if of.startswith("up") else "0x30") for of, _ in ALERTS.values()]
        assert not firing(tmp_path, name, quiet), name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of prometheus")
@pytest.mark.parametrize(
    ("accept_length", "width", "fires"),
    [
        (1.1, 16, True),
        (3, 16, False),
        (1.1, JUDGED_WIDTH, True),
        # a few wide steps among those that draft nothing
        (1.1, JUDGED_WIDTH - 0.5, False),
        # chosen under load, and by a host-bound target: one token by design
        (1, 1, False),
    ],
)
def test_a_low_accept_length_alerts_only_where_drafts_are_verified(
    tmp_path: Path, accept_length: float, width: float, fires: bool
) -> None:
    series = [
        STEPS,
        (COMMITTED, f"0+{100 * accept_length:g}x30"),
        (VERIFIED, f"0+{100 * width:g}x30"),
    ]
    assert firing(tmp_path, "DFlashAcceptLengthLow", series) == fires


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of prometheus")
def test_an_idle_server_has_no_low_accept_length(tmp_path: Path) -> None:
    idle = [(STEPS[0], "5x30"), (COMMITTED, "5x30"), (VERIFIED, "80x30")]
    assert not firing(tmp_path, "DFlashAcceptLengthLow", idle)
