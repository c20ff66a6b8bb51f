"""`--help` of every program: it explains all options, and ends with examples that parse."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_dflash.__main__ import LOAD_SGLANG, main, make_parser
from sglang_dflash.command_help import parser_of
from tests.program_files import program_files
from tests.unit.test_documents import Parsed, arguments_of, parse

OURS = Path("sglang_dflash/__main__.py")
# since.py reads no arguments
WITHOUT_EXAMPLE = {Path("tests/smoke/since.py")}
PROGRAMS = [path for path in program_files() if path not in WITHOUT_EXAMPLE]


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the commands of `sglang-dflash`."""
    [table] = [
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return dict(table.choices)


def options_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    """Return the options of a program, which its `main` gives the parser."""
    found: list[argparse.Action] = []

    def keep(parser: argparse.ArgumentParser, *_: object) -> None:
        found.extend(parser._actions)
        raise Parsed

    program = importlib.import_module(module_of(path))
    with monkeypatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", keep)
        patch.setattr(sys, "argv", [str(path)])
        program.main()
    return found


def name_of(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else action.dest


def hides_default(action: argparse.Action) -> bool:
    """Return whether the help of an option omits a default, or tells another one. A path,
    and what is empty, can be in words."""
    default, shown = action.default, (action.help or "") % vars(action)
    if default is None or default is argparse.SUPPRESS or isinstance(default, bool):
        return False
    values = default if isinstance(default, list | tuple) else [default]
    if not values:
        return False
    words = " ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)
    is_short = bool(words) and "/" not in words
    return not re.search(f"default: {re.escape(words)}(?:[,;]|$)" if is_short else "default", shown)


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__main__")


def help_of(
    path: Path, *words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    program = importlib.import_module(".".join(path.with_suffix("").parts))
    monkeypatch.setattr(sys, "argv", [str(path), *words, "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        program.main()
    return capsys.readouterr().out


def examples_in(shown: str) -> list[str]:
    """Return the command lines with which a help text ends, those that are continued joined."""
    _, title, block = shown.rpartition("\nexample")
    assert title, f"no example:\n{shown}"
    heading, *lines = block.splitlines()
    assert heading in (":", "s:") and all(line.startswith("  ") for line in lines), block
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def own_commands(path: Path, lines: list[str]) -> list[str]:
    """Return the examples that run the program itself, written as `python -m`."""
    found = []
    for line in lines:
        as_module = f"{line} ".replace(f"python {path} ", f"python -m {module_of(path)} ").strip()
        if as_module.startswith("python -m ") and arguments_of(as_module)[0] == module_of(path):
            found.append(as_module)
    return found


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_every_program_shows_an_example_that_it_accepts(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(path, monkeypatch=monkeypatch, capsys=capsys)
    examples = own_commands(path, examples_in(shown))
    assert examples, shown
    for line in examples:
        parse(line, is_whole=True, monkeypatch=monkeypatch)


@pytest.mark.parametrize("command", commands())
def test_every_command_shows_an_example_that_it_accepts(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(OURS, command, monkeypatch=monkeypatch, capsys=capsys)
    [line] = own_commands(OURS, examples_in(shown))
    assert arguments_of(line)[1][0] == command
    parse(line, is_whole=True, monkeypatch=monkeypatch)


@pytest.mark.parametrize("path", [path for path in PROGRAMS if path != OURS], ids=str)
def test_every_option_is_explained_with_its_default(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(path, monkeypatch)
    assert options
    assert [name_of(each) for each in options if not each.help] == []
    assert [name_of(each) for each in options if hides_default(each)] == []


@pytest.mark.parametrize("command", commands())
def test_every_option_of_a_command_is_explained(command: str) -> None:
    options = commands()[command]._actions
    assert [name_of(each) for each in options if not each.help] == []
    assert [name_of(each) for each in options if hides_default(each)] == []


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("command", LOAD_SGLANG)
def test_who_waits_for_sglang_to_load_is_told_so(
    command: str,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Imports took up to half a minute without a word."""
    name = f"sglang_dflash.commands.{command}"
    run_it = f"run_{command}"
    shown: list[str] = []

    def late(*_: object) -> int:
        shown.append(capsys.readouterr().err)
        return 0

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{run_it: late}))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert main([command]) == 0
    assert ("loading SGLang" in shown[0]) == is_terminal


def test_a_command_without_its_package_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "sglang_dflash.commands.plain_towers", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SystemExit, match="^1$"):
        main(["plain-towers", "some/model"])
    assert "has no huggingface_hub. Use a Python that has SGLang" in capsys.readouterr().err


def test_a_default_that_the_help_hides_is_found() -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    shown = [
        add("--steps", default=50, help="steps; default: %(default)s"),
        add("--rates", default=[0.5, 2.0], help="requests/s; default: 0.5 2, both"),
        add("--limit", default=0, help="default: 0, no limit"),
        add("--out", default=Path("/a/x"), help="default: the one in a"),
        add("--plain", action="store_true"),
    ]
    hidden = [
        add("--few", default=5, help="few; default: 50"),
        add("--many", default=[1, 8], help="1 or 8"),
        add("--none", default=0, help="0: no limit"),
    ]
    assert not any(map(hides_default, shown)) and all(map(hides_default, hidden))


def test_a_help_is_the_first_paragraph_and_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    doc = "Count the words of files, one by\none.\n\n    count FILE \\\n        --all\n\nMore.\n"
    shown = parser_of(doc, prog="count").format_help()
    assert "\n\nCount the words of files,\none by one.\n\n" in shown
    assert shown.endswith("\n\nexample:\n  count FILE \\\n      --all\n")
    both = parser_of("Count.\n\n    count A\n    count B\n\nMore.\n\n    count C").format_help()
    assert both.endswith("\n\nexamples:\n  count A\n  count B\n  count C\n")


def test_a_help_without_an_example_is_found() -> None:
    with pytest.raises(AssertionError, match="no example"):
        examples_in("usage: count FILE\n\nCount the words of a file.\n")
    with pytest.raises(AssertionError):
        examples_in("\nexample:\n  count FILE\n\nCount the words of a file.\n")
    assert own_commands(Path("launch/client.py"), ["  python -m benchmarks.load", "  make"]) == []
