"""The data and the page of `python -m sglang_dflash report --web`, asked over HTTP."""

from __future__ import annotations

import http.server
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from sglang_dflash.__main__ import main
from sglang_dflash.commands.history import ALL, History
from sglang_dflash.commands.web import listen
from sglang_dflash.metrics import AcceptanceMeter
from sglang_dflash.testing.server import ROOT, free_port


def replica(
    dp_rank: int, steps: list[tuple[int, int]], *, alarms: int = 0, free: int = 100
) -> dict[str, Any]:
    """Return the state of a replica of block size 4 after steps of (correct drafts, width), each of
    which took 2 ms to draft, 5 ms to verify and 1 ms to commit."""
    meter = AcceptanceMeter(4)
    for correct, width in steps:
        meter.record(correct, correct + 1, width)
    count = len(steps)
    seconds = {"draft": 0.002 * count, "verify": 0.005 * count, "commit": 0.001 * count}
    return {
        "dp_rank": dp_rank,
        "acceptance": meter.snapshot(),
        "alarms": alarms,
        "free_kv_slots": free,
        "stages": {"steps": count, "seconds": seconds},
        "width": {"mode": "auto", "survival": [0.8, 0.6, 0.4]},
        "drafter": "some/drafter",
        "device": "cpu",
    }


class FakeServer:
    """An HTTP server that answers /server_info with what a test puts into `states`."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] | None = [{"sglang_dflash": replica(0, [])}]
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/server_info"
                self.send_response(200 if found else 404)
                self.end_headers()
                info = {"served_model_name": "some/target", "max_total_num_tokens": 200}
                if fake.states is not None:
                    info |= {"internal_states": fake.states}
                self.wfile.write(json.dumps(info).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def report(self, *replicas: dict[str, Any]) -> None:
        self.states = [{"sglang_dflash": ours} for ours in replicas]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def history(fake: FakeServer) -> History:
    return History([fake.url])


def last(part: dict[str, Any]) -> dict[str, Any]:
    return {name: values[-1] for name, values in part["series"].items()}


def test_rates_are_those_between_two_polls(fake: FakeServer) -> None:
    """Means since the server's start would hide what has changed in the last minute."""
    history = History([fake.url], clock=iter([1000.0, 1002.0]).__next__)
    fake.report(replica(0, [(0, 4)] * 10))
    history.poll()
    fake.report(replica(0, [(0, 4)] * 10 + [(3, 4), (1, 2)], alarms=1, free=90))
    history.poll()
    data = history.data()
    [shown] = data["replicas"]
    assert data["at"] == [1000.0, 1002.0]
    assert shown["series"]["accept_length"] == [None, 3.0]
    assert last(shown) == {
        "tokens_per_s": 3.0,
        "accept_length": 3.0,
        "width": 3.0,
        "draft_ms": 2.0,
        "verify_ms": 5.0,
        "commit_ms": 1.0,
        "free_kv_slots": 90,
        "alarms": 1,
    }
    assert shown["accepted_at"] == [1.0, 0.5, 0.5]
    assert shown["histogram"] == [0.0, 0.5, 0.0, 0.5]
    assert (shown["block_size"], shown["capacity"], shown["steps"]) == (4, 200, 2)
    assert (shown["survival"], shown["modes"]) == ([0.8, 0.6, 0.4], ["auto"])


def test_an_idle_server_has_no_accept_length(fake: FakeServer, history: History) -> None:
    """A zero would be drawn as a drafter that is always wrong."""
    fake.report(replica(0, [(3, 4)]))
    history.poll()
    history.poll()
    shown = last(history.data()["replicas"][0])
    assert (shown["tokens_per_s"], shown["accept_length"], shown["verify_ms"]) == (0.0, None, None)


def test_replicas_are_shown_each_and_in_sum(fake: FakeServer) -> None:
    history = History([fake.url], clock=iter([1000.0, 1001.0]).__next__)
    fake.report(replica(0, []), replica(1, []))
    history.poll()
    fake.report(replica(0, [(3, 4)] * 3, free=80), replica(1, [(0, 2)], alarms=2))
    history.poll()
    data = history.data()
    assert [part["name"] for part in data["replicas"]] == ["dp_rank 0", "dp_rank 1"]
    assert [last(part)["accept_length"] for part in data["replicas"]] == [4.0, 1.0]
    whole = last(data["all"])
    # of four steps, not the mean of two replicas
    assert (whole["accept_length"], whole["width"], whole["tokens_per_s"]) == (3.25, 3.5, 13.0)
    assert (whole["free_kv_slots"], whole["alarms"], data["all"]["capacity"]) == (180, 2, 400)
    assert data["all"]["accepted_at"] == [0.75, 0.75, 0.75]


def test_several_servers_are_told_apart(fake: FakeServer) -> None:
    other = FakeServer()
    try:
        history = History([fake.url, other.url])
        history.poll()
        names = [part["name"] for part in history.data()["replicas"]]
    finally:
        other.stop()
    assert names == [f"{url.removeprefix('http://')} dp_rank 0" for url in (fake.url, other.url)]


def test_a_restarted_server_counts_from_zero(fake: FakeServer, history: History) -> None:
    """Its counts are smaller than before, so a difference would be negative."""
    fake.report(replica(0, [(0, 4)] * 10))
    history.poll()
    fake.report(replica(0, [(3, 4)] * 2))
    history.poll()
    assert last(history.data()["all"])["accept_length"] == 4.0


def test_a_server_that_is_busier_since_its_restart_has_no_negative_shares(
    fake: FakeServer, history: History
) -> None:
    """More steps than before, but of other kinds: 100 of one token, then 10 of one and 140 of
    four."""
    history.poll()
    fake.report(replica(0, [(0, 4)] * 100))
    history.poll()
    fake.report(replica(0, [(0, 4)] * 10 + [(3, 4)] * 140))
    history.poll()
    [shown] = history.data()["replicas"]
    assert last(shown)["accept_length"] == 3.8
    assert (shown["steps"], shown["histogram"]) == (250, [0.44, 0.0, 0.0, 0.56])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"acceptance": {"verify_steps": 3}}, "it lacks 'histogram'"),
        ({"acceptance": {**replica(0, [])["acceptance"], "histogram": ["many"]}}, "'many'"),
        ({"acceptance": None}, "NoneType"),
        ({"free_kv_slots": None}, "NoneType"),
        ({"dp_rank": "first", "width": {"mode": "auto"}}, "it lacks 'survival'"),
        ({"stages": {"steps": 1, "seconds": ["draft"]}}, "'list' object"),
    ],
)
def test_a_server_of_another_version_is_named_and_the_others_are_shown(
    fake: FakeServer, changes: dict[str, Any], reason: str
) -> None:
    """If it ended the polls, the page would show what was before for ever."""
    other = FakeServer()
    try:
        history = History([fake.url, other.url])
        fake.report({**replica(0, []), **changes})
        for _ in range(2):
            history.poll()
        data = history.data()
        fake.report(replica(0, []))
        history.poll()
        later = history.data()
    finally:
        other.stop()
    assert [server["state"] for server in data["servers"]] == ["not understood", "serving"]
    told = data["servers"][0]["message"]
    assert told.startswith(f"The DFLASH state that the server at {fake.url} reports is not")
    assert reason in told and told.endswith("the same version of sglang-dflash here and there.")
    assert [part["answers"] for part in data["replicas"]] == [True]
    assert [server["state"] for server in later["servers"]] == ["serving", "serving"]


def test_nothing_is_drawn_across_a_time_without_answer(fake: FakeServer, history: History) -> None:
    history.poll()
    fake.states = [{}]
    history.poll()
    fake.report(replica(0, [(3, 4)]))
    history.poll()
    history.poll()
    tokens = history.data()["replicas"][0]["series"]["tokens_per_s"]
    assert tokens == [None, None, None, 0.0]


def test_each_state_of_a_server_is_named(fake: FakeServer, history: History) -> None:
    def state() -> tuple[str, str]:
        history.poll()
        [server] = history.data()["servers"]
        return server["state"], server["message"]

    assert history.data()["servers"][0]["state"] == "asking"
    assert state() == ("serving", "")
    fake.states = [{}]
    assert state()[0] == "no dflash"
    assert "runs without our DFLASH" in state()[1]
    fake.states = None
    told = f"{fake.url} is not an SGLang server (its /server_info has another format). Pass the"
    assert state() == ("not sglang", f"{told} --url of one.")
    fake.stop()
    assert state()[0] == "unreachable"
    [server] = history.data()["servers"]
    assert server["message"].startswith(f"No SGLang server answers at {fake.url}")
    assert server["model"] == "some/target" and server["answered_at"] is not None
    whole = history.data()["all"]
    assert (whole["answers"], whole["block_size"], whole["capacity"]) == (False, 4, 200)


def test_a_server_from_before_the_stages_is_shown_without_them(
    fake: FakeServer, history: History
) -> None:
    ours = replica(0, [(3, 4)])
    for name in ("stages", "width"):
        del ours[name]
    history.poll()
    fake.report(ours)
    history.poll()
    [shown] = history.data()["replicas"]
    assert last(shown)["accept_length"] == 4.0
    assert (last(shown)["draft_ms"], shown["survival"], shown["modes"]) == (None, [], [])


def test_only_the_latest_polls_are_kept(fake: FakeServer) -> None:
    history = History([fake.url], polls=3)
    for _ in range(5):
        history.poll()
    assert len(history.data()["at"]) == 3


def test_page_and_data_are_served_and_nothing_else(fake: FakeServer) -> None:
    """The policy makes a browser refuse whatever would be asked of another host."""
    with listen(History([fake.url]), "127.0.0.1", 0, 0.01) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_port}"
        shown, missing = requests.get(url, timeout=10), requests.get(f"{url}/x", timeout=10)
        while not (data := requests.get(f"{url}/data", timeout=10).json())["at"]:
            pass
        page.shutdown()
    assert "connect-src 'self'" in shown.headers["Content-Security-Policy"]
    assert missing.status_code == 404
    assert data["interval_s"] == 0.01 and data["all"]["name"] == ALL
    addresses = set(re.findall(r"""https?://[^"'\s]*""", shown.text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of SVG is never asked for"


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"Port {port} of 127.0.0.1 is in use. Stop what"):
            main(["report", "--web", "--port", str(port)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://host"], "--url ftp://host is not the URL of a server"),
        (["--url", "host:port"], "--url host:port is not the URL of a server"),
        (["--url", "http://"], "--url http:// is not the URL of a server"),
        (["--port", "70000"], "--port 70000 is not a port"),
        (["--host", "192.0.2.1"], "Cannot listen at --host 192.0.2.1"),
        (["--png", "a.png"], "--png and --looks are for the report in the terminal"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "--web", *arguments])
    assert str(ended.value.code).startswith(message)


def test_the_terminal_takes_one_server() -> None:
    with pytest.raises(SystemExit, match="shows one server, but --url names 2. Pass one"):
        main(["report", "--url", "a:1", "b:1", "--looks", "1"])


@pytest.mark.parametrize("words", [["--host", "::"], ["--port", "0"]], ids=" ".join)
def test_the_terminal_has_no_address(words: list[str]) -> None:
    """Who passes one has forgotten --web."""
    with pytest.raises(SystemExit, match="--host and --port are for the live page. Add --web"):
        main(["report", "--url", "127.0.0.1:1", *words])


def test_ctrl_c_ends_it_at_once() -> None:
    """Even while a server that is asked takes its time to answer."""
    program = (
        "import sys; from sglang_dflash.__main__ import main\n"
        "from sglang_dflash.commands import ask; ask.ANSWER_S = 3600; sys.exit(main(sys.argv[1:]))"
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url, port = f"http://127.0.0.1:{silent.getsockname()[1]}", free_port()
        process = subprocess.Popen(
            [sys.executable, "-c", program, "report", "--web", "--url", url, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert said.startswith(f"Watching {url}: open http://127.0.0.1:{port} ")
    assert (process.returncode, errors) == (130, "report: stopped\n")
