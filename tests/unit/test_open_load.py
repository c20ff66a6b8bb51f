"""benchmarks/open_load.py without a model: arrivals, streams, percentiles and the table."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from benchmarks import open_load, real_text
from benchmarks.open_load import Answer


def part(tokens: int) -> bytes:
    return b"data: " + json.dumps({"meta_info": {"completion_tokens": tokens}}).encode()


def test_arrivals_are_poisson_and_the_same_for_all_systems() -> None:
    times = open_load.arrivals(20.0, 500.0)
    assert times == open_load.arrivals(20.0, 500.0)
    assert times[0] == 0 and times[-1] < 500
    assert len(times) == pytest.approx(10_000, rel=0.04)
    gaps = np.diff(times)
    assert gaps.min() > 0 and gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


def test_prompts_are_first_questions(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a", "b"]},
        {"prompt": "c"},
        {"question": "d"},
        {"turns": ["e"], "prompt": ""},
    ]
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert sorted(real_text.read_prompts([file])) == ["a", "c", "d", "e"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "line 1 is '5'"),
        ("", "it has no question"),
        ('{"prompt": "a"}\n{}', "its object 2 has"),
    ],
)
def test_a_file_without_questions_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(SystemExit, match=f"^--prompts {file}: {said}"):
        real_text.read_prompts([file])


def test_a_stream_is_timed_from_its_arrival_to_its_last_token() -> None:
    clock = count(start=3)
    lines = [b"", part(1), b"", part(4), part(9), b"data: [DONE]"]
    found = open_load.read_stream(lines, 1.0, lambda: next(clock))
    assert found == Answer(1.0, first=3, ended=5, first_tokens=1, tokens=9)
    assert found.to_first_token == 2
    assert found.per_token == 2 / 8


def test_an_answer_of_one_part_has_no_time_per_token() -> None:
    assert open_load.read_stream([part(1)], 0.0, lambda: 1.0).per_token is None


@pytest.mark.parametrize("lines", [[], [b"data: [DONE]"], [b'data: {"error": "too long"}']])
def test_a_stream_without_tokens_is_an_error(lines: list[bytes]) -> None:
    with pytest.raises(RuntimeError, match=r"no tokens|too long"):
        open_load.read_stream(lines, 0.0, lambda: 1.0)


def test_percentiles() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [open_load.percentile(values, share) for share in (0, 50, 99, 100)] == [1, 100, 198, 200]
    assert open_load.percentile([7.0], 99) == 7.0
    assert open_load.percentile([], 50) is None


class Handler(BaseHTTPRequestHandler):
    """Streams 3 tokens, but refuses a prompt of token 9."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["sampling_params"]["max_new_tokens"] == 5
        text = b"\n\n".join([part(1), part(3), b"data: [DONE]", b""])
        self.send_response(400 if body["input_ids"] == [9] else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_requests_are_sent_at_their_times(url: str) -> None:
    times = [0.0, 0.2, 0.4]
    answers, failures = open_load.run_point(url, [[1], [9]], times, 5)
    assert [answer.arrived for answer in answers] == [0.0, 0.4]
    assert all(answer.first >= answer.arrived and answer.tokens == 3 for answer in answers)
    assert len(failures) == 1 and "request 1: 400" in failures[0]


def test_a_point_and_its_row() -> None:
    answers = [Answer(0.0, 0.5, 1.5, 1, 11), Answer(1.0, 1.1, 2.0, 1, 1)]
    point = open_load.numbers(4.0, answers, ["request 2: no"])
    assert point["requests"] == 3 and point["failed"] == 1 and point["tokens_per_s"] == 6.0
    assert point["first_token_ms"] == {"50": 100.0, "99": 500.0}
    assert point["ms_per_token"] == {"50": 100.0, "99": 100.0}
    nothing = open_load.numbers(2.0, [], [])
    results = {"plain": {"points": [point]}, "ours": {"points": [nothing], "error": "gone"}}
    text = open_load.table(results)
    rows = text.splitlines()[2:4]
    assert rows[0] == "| 2 | ours | 0.0 |  |  |  |  |  |"
    assert rows[1] == "| 4 | plain | 6.0 | 100.0 | 100.0 | 100.0 | 500.0 | 1 |"
    assert "ours failed: gone" in text


@pytest.mark.parametrize("more", ["--rates 0", "--model-path x", "--prompts none.jsonl"])
def test_bad_arguments_are_refused(more: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(SystemExit):
        open_load.parse(["--prompts", str(tmp_path / "x.jsonl"), *more.split()])
