"""Fetching the tasks' questions, from a viewer that answers as the documented one does."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from benchmarks import task_files, tasks
from benchmarks.task_questions import read_questions

SPLITS: dict[tuple[str, str, str], list[dict[str, Any]]] = {
    ("openai/gsm8k", "main", "test"): [
        {"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(205)
    ],
    ("openai/openai_humaneval", "openai_humaneval", "test"): [
        {"prompt": "def one():\n", "canonical_solution": "    return 1\n"}
    ],
    ("HuggingFaceH4/mt_bench_prompts", "default", "train"): [{"prompt": ["Write.", "Shorten it."]}],
    # without the solution
    ("HuggingFaceH4/MATH-500", "default", "test"): [{"problem": "1 + 1"}],
}


@pytest.fixture
def viewer() -> Iterator[str]:
    class Viewer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked = {name: value for name, [value] in parse_qs(url.query).items()}
            found = SPLITS.get((asked["dataset"], asked["config"], asked["split"]))
            begin, length = int(asked["offset"]), int(asked["length"])
            is_right = url.path == "/rows" and found is not None and length <= 100
            self.send_response(200 if is_right else 404)
            self.end_headers()
            if is_right and found is not None:
                rows = [{"row_idx": i, "row": row} for i, row in enumerate(found)]
                page = {"rows": rows[begin : begin + length], "num_rows_total": len(found)}
                self.wfile.write(json.dumps(page).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Viewer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_row_becomes_a_question(viewer: str, tmp_path: Path) -> None:
    assert task_files.fetch(["gsm8k", "humaneval", "mtbench"], tmp_path, viewer=viewer) == {}
    found = {question.id: question for question in read_questions(tmp_path, "gsm8k", 0)}
    assert len(found) == 205
    last = found["gsm8k/204"]
    assert last.turns == ("What is 204 + 204?" + task_files.IN_A_BOX,)
    assert last.reference == "#### 408"
    [code] = read_questions(tmp_path, "humaneval", 0)
    assert code.turns[0].endswith("tests:\n```python\ndef one():\n\n```")
    [chat] = read_questions(tmp_path, "mtbench", 0)
    assert chat.turns == ("Write.", "Shorten it.") and chat.reference is None


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text("{}")
    assert task_files.fetch(["gsm8k"], tmp_path, viewer="http://127.0.0.1:1") == {}


def test_what_cannot_be_fetched_is_said_and_leaves_no_file(viewer: str, tmp_path: Path) -> None:
    failed = task_files.fetch(["mbpp", "math500"], tmp_path, viewer=viewer)
    assert failed["mbpp"] == f"{viewer}/rows for google-research-datasets/mbpp: HTTP 404"
    assert failed["math500"] == "HuggingFaceH4/MATH-500 has no column 'solution': ['problem']"
    assert list(tmp_path.iterdir()) == []
    failed = task_files.fetch(["mbpp"], tmp_path, viewer="http://127.0.0.1:1")
    assert failed["mbpp"].endswith("ConnectionError")


def test_nothing_is_asked_for_offline(
    viewer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    failed = task_files.fetch(["gsm8k"], tmp_path, viewer=viewer)
    assert failed == {"gsm8k": "HF_HUB_OFFLINE is set"}


def test_tasks_run_with_what_could_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task_files, "FOLDER", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "mbpp.jsonl").write_text('{"id": "mbpp/0", "prompt": "Sort a list."}')
    options = tasks.parse([])
    assert options.tasks == ["mbpp"] and options.data == tmp_path
    assert "gsm8k.jsonl (HF_HUB_OFFLINE is set), " in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"not fetched: gsm8k \(HF_HUB_OFFLINE is set\)\. Pass"):
        tasks.parse(["--tasks", "gsm8k", "mbpp"])
    (tmp_path / "mbpp.jsonl").unlink()
    with pytest.raises(SystemExit, match="has none of gsm8k"):
        tasks.parse([])


def test_a_task_of_no_such_name_is_refused_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_files, "FOLDER", tmp_path)
    monkeypatch.setattr(task_files, "rows", lambda *_: pytest.fail("fetched"))
    with pytest.raises(SystemExit, match=r"no task named nonsense\. .*: gsm8k, .*, mtbench") as e:
        tasks.parse(["--tasks", "gsm8k", "nonsense"])
    assert "nonsense.jsonl as --data DIR" in str(e.value)
    # one's own, in a folder
    (tmp_path / "nonsense.jsonl").write_text('{"id": "1", "prompt": "Say something."}')
    options = tasks.parse(["--tasks", "nonsense", "--data", str(tmp_path)])
    assert options.tasks == ["nonsense"] and options.data == tmp_path
