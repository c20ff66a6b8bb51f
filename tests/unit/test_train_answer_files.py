"""What an interruption leaves in a file of answers."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from sglang_dflash.train.answers import Answer, answer_files, append_answers, read_answers

ANSWERS = [
    Answer(f"{n:02d}.0", n / 10, "stop", array("i", range(n + 3)), array("i", range(40 + n)))
    for n in range(13)
]


def by_key(answers: list[Answer]) -> dict[str, Answer]:
    return {answer.key: answer for answer in answers}


def test_an_interrupted_group_of_answers_is_dropped_and_the_rest_kept(tmp_path: Path):
    """If this broke, a killed run would lose its answers, or never read further ones."""
    append_answers(tmp_path, ANSWERS[:5])
    (path,) = answer_files(tmp_path)
    complete = path.stat().st_size
    append_answers(tmp_path, ANSWERS[5:9])
    path.write_bytes(path.read_bytes()[: complete + 40])
    assert read_answers([path], repair=True) == by_key(ANSWERS[:5])
    append_answers(tmp_path, ANSWERS[5:])
    assert read_answers([path]) == by_key(ANSWERS)


@pytest.mark.parametrize("size", [0, 5, 40])
def test_an_interrupted_first_group_does_not_end_a_resumed_run(size: int, tmp_path: Path):
    """If this broke, a run killed while it wrote its first answers could not be resumed."""
    append_answers(tmp_path, ANSWERS)
    (path,) = answer_files(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    assert read_answers([path], repair=True) == {}
    append_answers(tmp_path, ANSWERS)
    assert read_answers([path]) == by_key(ANSWERS)
