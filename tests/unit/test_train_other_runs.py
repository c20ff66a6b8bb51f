"""Answers of other runs: from the same target only, and held out by prompt."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from sglang_dflash.pairs import tiny_target
from sglang_dflash.train.answers import Answer, answer_files, append_answers
from sglang_dflash.train.held_out import split_answers
from tests.unit.test_train_command import SMALL, train


def answer(key: str, temperature: float = 0.0, token: int = 50) -> Answer:
    return Answer(key, temperature, "stop", array("i", [40] * 5), array("i", [token] * 20))


def write_run(folder: Path, *answers: Answer, **settings: str) -> Path:
    """Write an answer file, with the settings of its run beside it; return its path."""
    folder.mkdir()
    append_answers(folder, answers)
    if settings:
        (folder / "run.json").write_text(json.dumps({"settings": settings}))
    [path] = answer_files(folder)
    return path


SIX = [answer(f"{n}.0") for n in range(6)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param(
            {"model_path": "Qwen/Qwen3-8B", "thinking": "default"},
            f"--model-path is {tiny_target()} here and was Qwen/Qwen3-8B there",
            id="target",
        ),
        pytest.param(
            {"model_path": str(tiny_target()), "thinking": "off"},
            "--thinking is default here and was off there",
            id="thinking",
        ),
    ],
)
def test_answers_of_a_run_with_other_settings_are_refused(
    settings: dict[str, str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this broke, a drafter would learn what its target does not write."""
    path = write_run(tmp_path / "other", *SIX, **settings)
    assert train(*SMALL, "--answers", path, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    record = path.parent / "run.json"
    assert f"--answers {path} was made by a run with other settings ({record}): {reason}" in error


@pytest.mark.parametrize("name", ["elsewhere/target", "elsewhere/target/"])
def test_a_target_that_was_moved_is_still_the_same(name: str, tmp_path: Path) -> None:
    name = name.replace("target", tiny_target().name)
    path = write_run(tmp_path / "other", *SIX, model_path=name, thinking="default")
    given = ("--answers", path, "--out", tmp_path / "out", "--stop-after", "answers")
    assert train(*SMALL, *given) == 0


@pytest.mark.parametrize("token", [1024, -1])
def test_ids_outside_the_vocabulary_are_refused(
    token: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this broke, the first batch with such an id would end in an index error."""
    path = write_run(tmp_path / "other", *SIX, answer("6.0", token=token))
    assert train(*SMALL, "--answers", path, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert f"{path}: the answer 6.0 has token id {token}" in error
    assert "vocabulary of 1024" in error


def test_answers_of_unknown_origin_are_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "other", *SIX)
    given = ("--answers", path, "--out", tmp_path / "out", "--stop-after", "answers")
    assert train(*SMALL, *given) == 0
    assert f"{path} has no run.json beside it" in capsys.readouterr().out


def test_a_held_out_prompt_gives_one_greedy_answer_and_none_to_train_on() -> None:
    """If this broke, the accept length would be measured on prompts that were trained on."""
    names = [("a.0", 1.0), ("a.1", 0.0), ("a.2", 0.7), ("b.0", 0.0), ("c.0", 1.0), ("c.1", 0.0)]
    split = split_answers({key: answer(key, t) for key, t in names}, prompts=2)
    assert [a.key for a in split.held_out] == ["a.1", "b.0"]
    assert [a.key for a in split.training] == ["c.0", "c.1"]
    assert split.left_out == 2


def test_further_answers_to_held_out_prompts_are_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this broke, the answer stage would hold out whole prompts, but the training would not."""
    answers = [answer(f"{n}.{k}", temperature=k) for n in range(6) for k in range(2)]
    path = write_run(tmp_path / "other", *answers)
    out = tmp_path / "out"
    assert train(*SMALL, "--answers", path, "--out", out, "--evaluate-prompts", "3") == 0
    shown = capsys.readouterr().out
    assert "train: 6 sequences in " in shown
    assert "3 further answers to held-out prompts are left out" in shown
    assert "(3 further answers to these prompts are left out)" in (
        (out / "drafter" / "README.md").read_text()
    )


def test_prompts_are_counted_and_not_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "other", *(answer(f"{n}.{k}") for n in range(3) for k in range(2)))
    assert train(*SMALL, "--answers", path, "--out", tmp_path / "out") == 2
    found = "6 answers to 3 prompts were found and --held-out is 3: nothing is left to train on"
    assert found in capsys.readouterr().err


def test_an_answer_that_two_files_give_differently_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this broke, the order of the files would decide silently what is trained on."""
    one = write_run(tmp_path / "one", *SIX)
    two = write_run(tmp_path / "two", answer("5.0", token=51), answer("6.0"))
    assert train(*SMALL, "--answers", one, two, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--answers {one} and {two} have different answers with the key 5.0. Pass" in error


def test_an_answer_that_two_files_have_in_common_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one", *SIX)
    two = write_run(tmp_path / "two", *SIX[3:], answer("6.0"))
    given = ("--answers", one, two, "--out", tmp_path / "out", "--stop-after", "answers")
    assert train(*SMALL, *given) == 0
    assert "train: 7 answers" in capsys.readouterr().out
