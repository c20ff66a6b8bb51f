"""What launch/client.py says of servers that it cannot ask, or not about acceptance."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from launch import client
from sglang_dflash.metrics import AcceptanceMeter

ANSWER = "Because."
MODELS = [{"id": "some/target", "object": "model"}]


@dataclass
class Reports:
    """What the server reports; a test may change it before it asks."""

    info: dict[str, Any] | None = field(default_factory=dict)  # None: it has no /server_info
    models: list[dict[str, str]] = field(default_factory=list)  # without any, it answers nothing


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def url(reports: Reports) -> Iterator[str]:
    """The address of a server that gives one answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = {"object": "list", "data": reports.models} if reports.models else None
            found = {"/server_info": reports.info, "/v1/models": models}.get(self.path)
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            chunk = {"choices": [{"index": 0, "delta": {"content": ANSWER}}]}
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def told(monkeypatch: pytest.MonkeyPatch, url: str) -> str:
    """Return the sentence with which the client ends."""
    monkeypatch.setattr(sys, "argv", ["client.py", "Why?", "--url", url])
    with pytest.raises(SystemExit) as ended:
        client.main()
    return str(ended.value.code)


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> tuple[str, str]:
    """Return the answer that the client prints, and what it says of its acceptance."""
    monkeypatch.setattr(sys, "argv", ["client.py", "Why?", "--url", url])
    client.main()
    answer, _, said = capsys.readouterr().out.splitlines()
    return answer, said


@pytest.mark.parametrize("found", [{}, {"internal_states": None}], ids=["none", "no states"])
def test_a_server_with_another_info_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, url: str, reports: Reports, found: dict[str, Any]
) -> None:
    reports.info = found
    assert told(monkeypatch, url) == (
        f"http://{url} is not an SGLang server (its /server_info has another format). Pass the "
        "--url of one."
    )


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"internal_states": [{"load": 0.0}]}, "The server at {} runs without our DFLASH. Start "),
        (
            {"internal_states": [{"sglang_dflash": {"dp_rank": 0}}]},
            "The DFLASH state that the server at {} reports is not understood (it lacks "
            "'acceptance'). Use the same version of sglang-dflash here and there.",
        ),
        (None, "{} has no /server_info of SGLang's. If it is a router, pass "),
        ({}, "{} has no /server_info of SGLang's. If it is a router, pass "),
    ],
    ids=["plain", "another version", "router", "another info"],
)
def test_a_server_without_acceptance_to_show_answers_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    url: str,
    reports: Reports,
    found: dict[str, Any] | None,
    reason: str,
) -> None:
    """If this broke, a server that answers would be refused, or called what it is not."""
    reports.info, reports.models = found, MODELS
    answer, said = shown(monkeypatch, capsys, url)
    assert answer == ANSWER
    assert said.startswith(f"no acceptance to show: {reason.format(f'http://{url}')}")


def test_a_server_of_an_earlier_version_shows_its_acceptance(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    url: str,
    reports: Reports,
) -> None:
    """It counts no widths; every step verified a full block."""
    newer = ("at_width", "verified_rows", "expected_tokens")
    counts = AcceptanceMeter(3).snapshot()
    older = {name: value for name, value in counts.items() if name not in newer}
    ours = {"acceptance": older, "alarms": 0, "free_kv_slots": 9, "dp_rank": 0}
    reports.info, reports.models = {"internal_states": [{"sglang_dflash": ours}]}, MODELS
    expected = "accept length 0.00: 0 tokens in 0 verify steps"
    assert shown(monkeypatch, capsys, url) == (ANSWER, expected)


def test_a_server_that_answers_nothing_but_pages_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, url: str, reports: Reports
) -> None:
    """Some sites have a page at every address."""
    reports.info, reports.models = None, [{"name": "no id"}]
    assert told(monkeypatch, url).startswith(f"http://{url} is not an SGLang server (404 Client")


def test_a_slash_at_the_end_of_the_address_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The server would be asked for //server_info, and refuse it."""
    assert "has another format" in told(monkeypatch, f"http://{url}/")


def test_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "ftp://host") == (
        "--url ftp://host is not the URL of a server. Pass http://HOST:PORT."
    )
