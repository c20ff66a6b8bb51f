"""Serve a live page on the acceptance, width and speed of running servers."""

from __future__ import annotations

import argparse
import contextlib
import errno
import http.server
import json
import socket
import threading
from importlib.resources import files

from sglang_dflash.commands.ask import full_url
from sglang_dflash.commands.history import History

# where the page is served
HOST, PORT = "127.0.0.1", 8080
# the browser refuses whatever does not come from this process
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:"
)


class LivePage(http.server.ThreadingHTTPServer):
    """A page, and the data that it asks for: what the last poll has found."""

    def __init__(self, history: History, *, host: str, port: int, interval: float) -> None:
        self.page = files("sglang_dflash.commands").joinpath("live.html").read_bytes()
        self.interval = interval
        self._history = history
        self._ended = threading.Event()
        self.publish()
        self.address_family = socket.getaddrinfo(host, port)[0][0]
        super().__init__((host, port), Handler)
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def publish(self) -> None:
        """Make what is known the data that the page gets."""
        data = {"interval_s": self.interval, **self._history.data()}
        self.data = json.dumps(data).encode()

    def _poll(self) -> None:
        while not self._ended.is_set():
            self._history.poll()
            self.publish()
            self._ended.wait(self.interval)

    def server_close(self) -> None:
        self._ended.set()
        super().server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    server: LivePage

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._send(self.server.page, "text/html; charset=utf-8")
        elif path == "/data":
            self._send(self.server.data, "application/json")
        else:
            self.send_error(404)

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        # a page may be closed while it is answered
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing: the page polls, and would fill the terminal."""


def run_web(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    if options.png or options.looks:
        raise SystemExit("--png and --looks are for the report in the terminal. Omit --web.")
    urls = list(dict.fromkeys(full_url(url) for url in options.url))
    host = HOST if options.host is None else options.host
    port = PORT if options.port is None else options.port
    shown = f"[{host}]" if ":" in host else host
    with listen(History(urls), host, port, options.interval) as page:
        print(
            f"Watching {', '.join(urls)}: open http://{shown}:{page.server_port} (Ctrl-C ends it)",
            flush=True,
        )
        page.serve_forever()
    return 0


def listen(history: History, host: str, port: int, interval: float) -> LivePage:
    """Return the page's server, bound. Raise SystemExit with advice if it cannot be."""
    if not 0 <= port < 65536:
        raise SystemExit(f"--port {port} is not a port. Pass one from 1 to 65535, or 0 for any.")
    try:
        return LivePage(history, host=host, port=port, interval=interval)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SystemExit(
                f"Port {port} of {host} is in use. Stop what listens there, or pass another --port."
            ) from None
        raise SystemExit(
            f"Cannot listen at --host {host} --port {port}: {error.strerror}. "
            "Pass an address of this machine, and a port that you may use."
        ) from None
