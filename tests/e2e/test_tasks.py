"""benchmarks/tasks.py as a user runs it, on the embedded pair, with questions made here."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.task_questions import known_tasks, read_questions
from sglang_dflash.pairs import tiny_drafter
from sglang_dflash.pairs.tiny_corpus.corpus import sample_prompts
from sglang_dflash.testing.server import ROOT
from tests import programs
from tests.e2e.conftest import FULL_BLOCKS

TASKS = {"gsm8k": 1, "mtbench": 2}  # turns
QUESTIONS = 3


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one run over both tasks."""
    if torch.cuda.is_available():
        pytest.skip("equal to the last token in fp32, which launch/serve.sh does not serve")
    folder = tmp_path_factory.mktemp("tasks")
    texts = iter(sample_prompts(20, seed=11))
    for task, turns in TASKS.items():
        rows = [
            {
                "id": f"{task}/{i}",
                "turns": [next(texts) for _ in range(turns)],
                "reference": "#### 3",
            }
            for i in range(QUESTIONS)
        ]
        (folder / f"{task}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    # no --tasks: those that have no file here are left out
    arguments = ["--data", str(folder), "--concurrency", "1", "2"]
    arguments += ["--max-tokens", "40", "--out", str(folder / "out"), "--context-length", "512"]
    arguments += ["--side-by-side"]
    # on a busy machine the automatic width may rightly choose not to draft for a whole point
    with mock.patch.dict(os.environ, FULL_BLOCKS):
        ran = programs.run("benchmarks.tasks", *arguments, folder=ROOT)
    assert ran.status == 0, ran.output
    assert f"left out, not in {folder}: math500.jsonl, humaneval.jsonl, mbpp.jsonl\n" in ran.output
    return folder / "out"


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    return json.loads(out.with_suffix(".json").read_text())


def test_every_question_is_answered_at_every_concurrency(found: dict[str, Any]) -> None:
    assert set(found["results"]) == {"plain", "ours"}
    for result in found["results"].values():
        seen = [(p["task"], p["requests"], p["answered"], p["answers"]) for p in result["points"]]
        assert seen == [
            (task, requests, QUESTIONS, QUESTIONS * turns)
            for task, turns in TASKS.items()
            for requests in (1, 2)
        ]
        assert all(p["tokens_per_s"] > 0 and not p["failed"] for p in result["points"])
        # two rounds, which either agree or are marked
        assert all(p["spread"] is not None for p in result["points"])


def test_every_answer_equals_plain_decoding(found: dict[str, Any]) -> None:
    for point in found["results"]["ours"]["points"]:
        equal = point["equal_to_plain"]
        assert equal["equal"] == equal["of"] == QUESTIONS * TASKS[point["task"]]


def test_accept_length_is_what_the_server_counted(found: dict[str, Any]) -> None:
    for point in found["results"]["ours"]["points"]:
        counted = point["server_meter"]
        assert point["verify_steps"] == counted["verify_steps"] > 0
        assert point["committed_tokens"] == counted["committed_tokens"]
        assert sum(point["steps_by_accepted_drafts"]) == counted["verify_steps"]
        assert point["accept_length"] > 1
    assert "accept_length" not in found["results"]["plain"]["points"][0]


def test_the_result_says_where_it_comes_from(found: dict[str, Any], out: Path) -> None:
    assert found["command"].startswith("python -m benchmarks.tasks --concurrency 1 2")
    assert found["sglang"] and found["torch"]
    assert "; ours torch_native, draft torch_native." in out.with_suffix(".md").read_text()
    assert all(result["beside"] == 1 for result in found["results"].values())
    tiny = "sglang_dflash/pairs/tiny"
    weights = (tiny_drafter() / "model.safetensors").read_bytes()
    assert found["pair"] == {
        "target": f"{tiny}/target",
        "drafter": f"{tiny}/drafter",
        "drafter_sha256": hashlib.sha256(weights).hexdigest(),
    }
    assert str(out.parent) not in out.with_suffix(".json").read_text()


def test_the_table_has_a_row_per_task_and_a_speed_up(out: Path) -> None:
    text = out.with_suffix(".md").read_text()
    speed = text.split("Tokens/s")[1].split("\n\n")[1].splitlines()
    assert speed[0] == "| task | plain, 1 | ours, 1 | plain, 2 | ours, 2 |"
    assert [row.split(" | ")[0] for row in speed[2:]] == ["| GSM8K", "| MT-Bench"]
    assert all(row.count("x)") == 2 for row in speed[2:])
    assert "| MT-Bench | 6 of 6 | 6 of 6 | 6 of 6 |" in text
    pytest.importorskip("matplotlib")
    assert out.with_suffix(".png").stat().st_size > 5000


def test_a_task_that_is_asked_for_must_have_its_file(tmp_path: Path) -> None:
    """Results of fewer tasks than were asked for look complete."""
    with pytest.raises(SystemExit, match=r"mbpp\.jsonl does not exist"):
        read_questions(tmp_path, "mbpp", 0)
    with pytest.raises(SystemExit, match=r"none of gsm8k\.jsonl, .* Pass the folder that has them"):
        known_tasks(tmp_path, {})
