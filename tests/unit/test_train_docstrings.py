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


def test_an_out_that_cannot_be_written_is_refused_before_any_package_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this broke, a slip in a path would show after minutes of reading."""
    missing = tmp_path / "missing"
    refusals = {
        tmp_path: f"--out {tmp_path} is a folder. Pass the path of a file.",
        missing / "code.jsonl": f"--out {missing / 'code.jsonl'} cannot be written: there is no "
        f"folder {missing}. Make it, or pass a file in another one.",
    }
    for out, told in refusals.items():
        monkeypatch.setattr("sys.argv", ["docstrings", str(tmp_path / "a.whl"), "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == told
