"""`make test` lists the serving-path files changed since the last smoke test on a GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.smoke import since

SERVING = ("sglang_dflash/glue/step/worker.py", "sglang_dflash/step.py")
BESIDE = ("sglang_dflash/commands/report.py", "sglang_dflash/train/loss.py", "README.md")


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit at which the smoke test passed."""
    monkeypatch.setattr(since, "ROOT", tmp_path)
    monkeypatch.setattr(since, "RESULT", tmp_path / "smoke.json")
    for name in (*SERVING, *BESIDE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "first")
    found = {"commit": git(tmp_path, "rev-parse", "HEAD"), "passed": True, "gpu": "NVIDIA H200"}
    (tmp_path / "smoke.json").write_text(json.dumps(found))
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_serving_code_is_named(history: Path) -> None:
    for name in SERVING:
        (history / name).write_text("after\n")
    assert since.report().splitlines()[1:] == [*SERVING]


def test_training_and_words_are_not_the_serving_path(history: Path) -> None:
    for name in BESIDE:
        (history / name).write_text("after\n")
    assert since.report().endswith("unchanged since.")


def test_a_commit_of_another_history_is_said(history: Path) -> None:
    (history / "smoke.json").write_text(
        json.dumps({"commit": "0" * 40, "passed": True, "gpu": "NVIDIA H200"})
    )
    assert "is not in this history" in since.report()


def test_without_a_result_the_smoke_is_asked_for(history: Path) -> None:
    (history / "smoke.json").unlink()
    assert "make smoke" in since.report()
