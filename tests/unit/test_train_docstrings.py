"""Prompts from docstrings: lines as Python counts them, tests by their path, the output file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.train.docstrings import ASKS, main, make_prompts

FUNCTION = '''def pairs(items):
    """Return every item together with the one that stands one place after it in the list."""'''
BODY = "\n    return list(zip(items, items[1:]))\n"


def prompts_of(folder: Path) -> list[str]:
    return [row["prompt"] for row in make_prompts([folder])]


@pytest.mark.parametrize(
    "before",
    ["\f\n", "A = '\x1c'\n", "A = '\u2028'\n", "A = '\x85'\n", "A = 1\r\n", "A = 1\r"],
    ids=["form feed", "file separator", "line separator", "next line", "CRLF", "CR"],
)
def test_only_what_ends_a_line_of_python_moves_a_function(before: str, tmp_path: Path) -> None:
    """If this broke, prompts would be cut from the wrong lines of a file."""
    (tmp_path / "a.py").write_bytes((before + FUNCTION + BODY).encode())
    assert prompts_of(tmp_path) == [ASKS.format(FUNCTION)]


@pytest.mark.parametrize(
    ("name", "is_test"),
    [
        ("test/a.py", True),
        ("some/tests/a.py", True),
        ("some/tests.py", True),
        ("some/test_a.py", True),
        ("some/a_test.py", True),
        ("some/conftest.py", True),
        ("some/latest.py", False),
        ("attestation/a.py", False),
        ("some/contest.py", False),
    ],
)
def test_tests_are_known_by_the_parts_of_their_path(
    name: str, is_test: bool, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FUNCTION + BODY)
    assert prompts_of(tmp_path) == ([] if is_test else [ASKS.format(FUNCTION)])


def test_an_out_that_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text(FUNCTION + BODY)
    for out in (tmp_path, tmp_path / "missing" / "code.jsonl"):
        monkeypatch.setattr("sys.argv", ["docstrings", str(tmp_path), "--out", str(out)])
        with pytest.raises(SystemExit, match=f"--out {out} cannot be written"):
            main()
