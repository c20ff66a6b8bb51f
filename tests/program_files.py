"""The programs of the project, found in its sources."""

from __future__ import annotations

import ast
from pathlib import Path

from sglang_dflash.testing.server import ROOT

FOLDERS = ("sglang_dflash", "benchmarks", "launch", "tests/smoke")


def program_files() -> list[Path]:
    """Return the files that run something as a program, from the root."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in paths if is_program(path.read_text()))


def is_program(source: str) -> bool:
    tests = [node.test for node in ast.parse(source).body if isinstance(node, ast.If)]
    return "__name__ == '__main__'" in map(ast.unparse, tests)
