"""What launch/client.py says where there is no server to ask; with one, see tests/e2e."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from launch import client


@pytest.fixture
def info() -> dict[str, Any]:
    """What the server reports; a test may change it before it asks."""
    return {}


@pytest.fixture
def url(info: dict[str, Any]) -> Iterator[str]:
    """The address of a server that has nothing but /server_info."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/server_info" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(info).encode())

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


@pytest.mark.parametrize(
    "found",
    [{}, {"internal_states": None}, {"internal_states": [{"sglang_dflash": {}}]}],
    ids=["none", "no states", "another version"],
)
def test_a_server_with_another_info_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, url: str, info: dict[str, Any], found: dict[str, Any]
) -> None:
    info |= found
    assert told(monkeypatch, url) == (
        f"http://{url} is not an SGLang server (its /server_info has another format). Pass the "
        "--url of one."
    )


def test_a_slash_at_the_end_of_the_address_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The server would be asked for //server_info, and refuse it."""
    assert "has another format" in told(monkeypatch, f"http://{url}/")


def test_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "ftp://host") == (
        "--url ftp://host is not the URL of a server. Pass http://HOST:PORT."
    )
