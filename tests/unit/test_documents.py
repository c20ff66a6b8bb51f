"""README, docs and CONTRIBUTING: references exist, commands parse, figures name their origin."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.testing.server import ROOT

NAMES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
DOCUMENTS = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
FILE = re.compile(r"(?<![\w./*~-])[\w./*-]+\.(?:json|md|png|py|sh|toml|txt|ya?ml)(?![\w/*.])")
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:python -m |sglang-dflash )")
OURS = ("sglang_dflash", "benchmarks")
# what a user or a command makes
MADE = {"report.png", "scores.json"}
RESULTS = ROOT / "benchmarks" / "results"
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b")
MOST_LINES_OF_README = 130
# options of SGLang 0.5.17, with which figures were measured, that the newest release has not
EARLIER = {"--cuda-graph-bs", "--disable-piecewise-cuda-graph"}


class Parsed(Exception):
    """Raised once the arguments of a program are read, in place of its work."""


def blocks_of(text: str) -> list[str]:
    """Return the lines of code blocks, indented or fenced, with continued lines joined."""
    lines, is_fenced = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            lines.append(line.strip())
    return joined(lines)


def joined(lines: list[str]) -> list[str]:
    """Return lines with those that end in a backslash continued."""
    return re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


def spans_of(text: str) -> list[str]:
    """Return the code spans outside code blocks."""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("    ", "```")))
    return [" ".join(span.split()) for span in SPAN.findall(prose)]


def commands_of(text: str) -> list[tuple[str, bool]]:
    """Return our commands, and whether each is complete: in prose only a part may be shown."""
    found = [(line, True) for line in blocks_of(text)] + [(span, False) for span in spans_of(text)]
    return [(line, whole) for line, whole in found if COMMAND.match(line)]


def arguments_of(line: str) -> tuple[str, list[str]]:
    """Return the module that a command line runs, and its arguments, optional ones included."""
    words = shlex.split(COMMAND.sub(lambda m: m[0].split()[-1] + " ", line), comments=True)
    words = [bare for word in words if (bare := word.strip("[]"))]
    if words[0] == "-m":
        return words[1].rstrip(","), words[2:]
    return "sglang_dflash", words[1:]


def anchors_of(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_links(path: Path, text: str) -> list[str]:
    missing = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if "://" not in link and (not file.exists() or (anchor and anchor not in anchors_of(file))):
            missing.append(link)
    return missing


def missing_files(text: str, tracked: list[str]) -> list[str]:
    """Return the file names in code that no tracked file ends with; `*` stands for any text."""
    code = "\n".join([*blocks_of(text), *spans_of(text)])
    paths = "\n".join(f"/{path}" for path in tracked)
    missing = []
    for name in sorted(set(FILE.findall(code)) - MADE):
        pattern = re.escape(name.removeprefix("./")).replace(r"\*", "[^/\n]*")
        if not re.search(rf"/{pattern}$", paths, re.M):
            missing.append(name)
    return missing


def parse(line: str, *, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a command's arguments as its program would; ValueError if it has other options."""
    module, arguments = arguments_of(line)
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{line}: there is no {module}")
    if not arguments:
        return
    read = argparse.ArgumentParser.parse_known_args
    depth = 0

    def refuse(_parser: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(f"{line}: {message}")

    def read_only(parser: argparse.ArgumentParser, *args: Any) -> Any:
        nonlocal depth
        if not is_whole:
            ask_for_nothing(parser)
        depth += 1
        options, others = read(parser, *args)
        depth -= 1
        if depth:
            return options, others
        # what a program does not know it passes on to its servers
        unknown = [name for name in others if name.startswith("-") and not is_of_sglang(name)]
        if unknown:
            refuse(parser, f"unrecognized arguments: {' '.join(unknown)}")
        raise Parsed

    program = importlib.import_module(f"{module}.__main__" if module == "sglang_dflash" else module)
    with monkeypatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", read_only)
        patch.setattr(sys, "argv", [module, *arguments])
        program.main()


@functools.cache
def server_arguments() -> str:
    """Return the source of SGLang's server arguments, whatever its release: loading it is slow."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "srt"
    files = [folder / "server_args.py", *folder.glob("arg_groups/fields/*.py")]
    return "\n".join(file.read_text() for file in files)


def is_of_sglang(name: str) -> bool:
    if name in EARLIER:
        return True
    word = name.lstrip("-").partition("=")[0]
    field = rf"^ +{word.replace('-', '_')}:"
    return f'"--{word}"' in server_arguments() or bool(re.search(field, server_arguments(), re.M))


def ask_for_nothing(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        action.required = False
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                ask_for_nothing(inner)


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_links_and_files_exist(path: Path, tracked: list[str]) -> None:
    text = path.read_text()
    assert missing_links(path, text) == []
    assert missing_files(text, tracked) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_commands_parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line, is_whole in commands_of(path.read_text()):
        if arguments_of(line)[0].split(".")[0] in OURS:
            parse(line, is_whole=is_whole, monkeypatch=monkeypatch)


def test_what_is_wrong_is_found(tracked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[a](docs/none.md) [b](#none) [c](README.md)\n\n`launch/none.sh`, `step.py`, `c*.sh`\n"
    assert missing_links(ROOT / "README.md", text) == ["docs/none.md", "#none"]
    assert missing_files(text, tracked) == ["launch/none.sh"]
    assert commands_of("    A=1 python -m benchmarks.soak \\\n      --chunk 1  # all\n") == [
        ("A=1 python -m benchmarks.soak --chunk 1  # all", True)
    ]
    for wrong in (
        "sglang-dflash report --uri http://127.0.0.1:30000",
        "python -m sglang_dflash train --model-path M",
        "python -m benchmarks.meter --steps 5 --none",
    ):
        with pytest.raises(ValueError, match="required|unrecognized"):
            parse(wrong, is_whole=True, monkeypatch=monkeypatch)
    parse("python -m sglang_dflash train --steps 5", is_whole=False, monkeypatch=monkeypatch)
    with pytest.raises(ValueError, match="unrecognized"):
        parse("python -m benchmarks.tasks --none 1", is_whole=False, monkeypatch=monkeypatch)


def around_tables(text: str) -> list[str]:
    """Return the text around each table, from the heading or table before it to the next one."""
    parts = re.split(r"^#+ .*$|((?:^\|.*\n)+)", text, flags=re.M)
    # text, a table or None, text, ...
    return [
        f"{parts[i - 1]}\n{parts[i + 1]}" for i in range(1, len(parts), 2) if parts[i] is not None
    ]


def commits_in(found: Any) -> set[str]:
    """Return the commits, in short, that a result file names at any depth."""
    if isinstance(found, list):
        return {commit for each in found for commit in commits_in(each)}
    if not isinstance(found, dict):
        return set()
    own = {str(found["commit"])[:7]} if "commit" in found else set()
    return own | commits_in(list(found.values()))


def unproven(text: str) -> str | None:
    """Return what is missing around a table of figures: result files, and their commits."""
    stems = {Path(name).stem for name in FILE.findall(text)}
    files = [path for path in RESULTS.glob("*.json") if path.stem in stems]
    if not files:
        return "names no file in benchmarks/results"
    measured = commits_in([json.loads(path.read_text()) for path in files])
    told = set(COMMIT.findall(text))
    if not told:
        return f"names no commit, but {sorted(path.name for path in files)} do"
    wrong = sorted(told - measured)
    return f"names commits {wrong}, which its result files do not have" if wrong else None


@pytest.mark.parametrize("name", ["results", "width"])
def test_every_table_of_figures_names_its_file_and_commit(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    # measured by others
    own = re.sub(r"^## Others' figures\n.*?(?=^## )", "", text, flags=re.M | re.S)
    tables = around_tables(own)
    assert len(tables) >= (9 if name == "results" else 1)
    assert [(told, text) for text in tables if (told := unproven(text))] == []


def test_a_table_without_its_origin_is_found() -> None:
    table = "| a |\n|---|\n| 1 |\n"
    first, second = around_tables(
        f"# One\n\nat 79c3115:\n\n{table}\nafter\n\n## Two\n\n{table}\nend\n"
    )
    assert "79c3115" in first and "after" in first
    assert "after" not in second and "end" in second
    assert unproven(second) == "names no file in benchmarks/results"
    assert unproven("`recipes-h200.md`") == "names no commit, but ['recipes-h200.json'] do"
    assert unproven("`recipes-h200.md` at 79c3115") is None
    assert "abcdef1" in str(unproven("`recipes-h200.md` at abcdef1"))


def test_the_readme_is_short() -> None:
    """It is the page that everybody reads: what only some need belongs into docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES_OF_README


def test_every_seam_is_listed() -> None:
    """Whoever ports to another release looks for them in docs/releases.md."""
    newest = ROOT / "sglang_dflash" / "glue" / "seams" / "sglang_0_5_23.py"
    defined = []
    for node in ast.parse(newest.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            defined.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            defined += re.findall(r"^\w+", ast.unparse(node))
    text = (ROOT / "docs" / "releases.md").read_text().partition("\n## What differs")[2]
    listed = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert listed == [name for name in defined if not name.startswith("_")]
