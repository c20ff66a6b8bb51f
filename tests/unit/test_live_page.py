"""The live page of `report --web` in a real browser, for what a single server does not have."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from sglang_dflash.commands.history import History
from sglang_dflash.commands.web import listen
from tests.browser import BROWSERS, browse, find_browser
from tests.unit.test_report_web import FakeServer, replica


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


def test_a_browser_shows_each_replica_its_alarms_and_survival(
    fake: FakeServer, tmp_path: Path
) -> None:
    """One of two replicas accepts little and has raised an alarm: a sum alone would hide which."""
    browser = find_browser()
    if browser is None:
        pytest.skip(f"needs {' or '.join(BROWSERS)} (Debian: apt install chromium)")
    history = History([fake.url], clock=iter([1000.0, 1002.0]).__next__)
    fake.report(replica(0, []), replica(1, []))
    history.poll()
    fake.report(replica(0, [(3, 4)] * 10), replica(1, [(0, 4)] * 10, alarms=1, free=40))
    # polls once; the next poll would be in ten minutes
    with listen(history, "127.0.0.1", 0, 600) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_port}"
        end = time.monotonic() + 30
        while len(requests.get(f"{url}/data", timeout=30).json()["at"]) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        found = browse(browser, url, tmp_path)
        page.shutdown()
    titles, *rows = found.rows
    shown = [dict(zip(titles, row, strict=True)) for row in rows]
    assert [row["accept length"] for row in shown] == ["2.50", "4.00", "1.00"]
    assert [row["tokens/s"] for row in shown] == ["25.00", "20.00", "5.00"]
    assert [row["alarms"] for row in shown] == ["1", "0", "1"]
    assert [row["free KV slots"] for row in shown] == ["140", "100", "40"]
    assert "see the server's log" in found.text
    ticks = [float(tick or "nan") for tick in found.values("data-tick")]
    assert ticks == pytest.approx([0.8, 0.6, 0.4])
    assert "tokens/s" in found.values("data-series")
