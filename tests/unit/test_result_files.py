"""How the benchmarks read files that are not what was asked for, and name their own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import front_picture, load, result_files, serving, tasks, tp_plan, trace_split

PROGRAMS = [
    (load, "--picture"),
    (serving, "--picture"),
    (tasks, "--picture"),
    (tp_plan, "--serving"),
    (tp_plan, "--shapes"),
    (tp_plan, "--server-info"),
    (trace_split, ""),
    (front_picture, "--load"),
]


def run(program: Any, option: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program", *option.split(), str(file)])
    program.main()


@pytest.mark.parametrize(
    ("program", "option"), PROGRAMS, ids=lambda each: getattr(each, "__name__", each)
)
@pytest.mark.parametrize("text", [None, "text", "[]", "{}"], ids=str)
def test_a_file_that_is_not_what_was_asked_for_is_one_line(
    program: Any, option: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user would otherwise get twenty lines of traceback for a misspelt name."""
    given = file = tmp_path / "folder" / "config.json"
    if option == "--shapes":
        given = file.parent
    if text is not None:
        file.parent.mkdir()
        file.write_text(text)
        # a pair's configs are read by the rest of the package, which judges them
        if option == "--shapes" and text == "{}":
            return
    with pytest.raises(SystemExit) as ended:
        run(program, option, given, monkeypatch)
    assert str(ended.value).startswith(f"{option or 'trace'} {file}")
    assert "\n" not in str(ended.value)


def test_a_gzipped_file_is_read_and_a_cut_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"a": list(range(1000))}).encode()))
    assert result_files.read(file, "trace", "a")["a"][-1] == 999
    whole = file.read_bytes()
    for wrong in (whole[:100], whole[:20] + b"xx" + whole[22:], b"text"):
        file.write_bytes(wrong)
        with pytest.raises(SystemExit, match=r"^trace .*a.json.gz: .* Pass a JSON file.$"):
            result_files.read(file, "trace", "a")


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n\n5\n')
    with pytest.raises(SystemExit, match=r"^--prompts .*a.jsonl: line 3 is '5'. Pass a file with"):
        result_files.read_lines(file, "--prompts")
    file.write_text('{"a": 1}\n\n')
    assert result_files.read_lines(file, "--prompts") == [{"a": 1}]


@pytest.mark.parametrize("name", ["r", "r.json"])
def test_without_matplotlib_the_hint_names_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(*_: Any) -> None:
        raise ImportError

    found = {"command": "c", "gpu": None, "commit": "abc", "sglang": "0.5.23"}
    result_files.write(found, tmp_path / name, "the table", draw)
    assert capsys.readouterr().out.endswith(f"run with --picture {tmp_path / 'r.json'}\n")
