"""Where `python -m sglang_dflash report` looks, and its message if nothing is there."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from sglang_dflash.__main__ import main
from sglang_dflash.metrics import AcceptanceMeter

METER = AcceptanceMeter(3)
for _ in range(10):
    METER.record(2, 3)
OURS = {"acceptance": METER.snapshot(), "alarms": 0, "free_kv_slots": 9, "dp_rank": 0}
STATE = {"internal_states": [{"sglang_dflash": OURS}]}


@pytest.fixture
def port() -> Iterator[int]:
    """A server that has nothing but /server_info."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/server_info" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(STATE).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_an_address_needs_no_scheme(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--url", f"localhost:{port}", "--looks", "1"]) == 0
    assert "accept length 3.00 over 10 verify steps" in capsys.readouterr().out


def test_a_server_that_is_none_of_sglang_is_told_apart(port: int) -> None:
    with pytest.raises(SystemExit, match="/x is not an SGLang server .404 .*Pass the --url of one"):
        main(["report", "--url", f"localhost:{port}/x", "--looks", "1"])


def test_a_dead_host_is_one_sentence() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "--url", "127.0.0.1:1", "--looks", "1"])
    assert ended.value.code == (
        "No SGLang server answers at http://127.0.0.1:1. Start one, or pass its --url."
    )
