"""What differs between the served releases of SGLang has one place, and the same names in each."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType
from typing import Any

import pytest

from sglang_dflash.glue import release, seams, symbols
from sglang_dflash.testing.server import ROOT

GLUE = ROOT / "sglang_dflash" / "glue"
SEAMS = {version: seams.of(version) for version in release.SERVED}
OLDEST = SEAMS[release.SERVED[0]]


def public(module: ModuleType) -> dict[str, Any]:
    """Return the names that a module defines, without those that it imports or keeps to itself."""
    tree = ast.parse(inspect.getsource(module))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    defined |= {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name: vars(module)[name] for name in defined}


def positional(function: Any) -> list[str]:
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("version", release.SERVED)
def test_every_release_has_every_seam(version: str) -> None:
    """A seam that a release lacks would fail in the middle of a server's start, or of a step."""
    module = SEAMS[version]
    assert public(module).keys() == public(OLDEST).keys()
    for name, value in public(module).items():
        if callable(value):
            assert positional(value) == positional(getattr(OLDEST, name)), name


def test_every_seam_is_used() -> None:
    text = "".join(p.read_text() for p in GLUE.rglob("*.py") if p.parent != GLUE / "seams")
    assert [name for name in public(OLDEST) if f"seams.{name}" not in text] == []


def test_no_other_file_asks_for_a_release() -> None:
    """An `if` on the version would hide a difference where the next port does not look for it."""
    for path in GLUE.rglob("*.py"):
        if path.parent == GLUE / "seams" or path.parent == GLUE / "symbols":
            continue
        # the README and docstrings may say since when SGLang does what
        code = ast.unparse(_without_docstrings(ast.parse(path.read_text())))
        found = re.findall(r"0\.5\.\d+|release\.(?:installed|judged_as|SERVED|NEWEST)", code)
        named = {"0.5.17", "0.5.23"} if path.name == "release.py" else set()
        if path.name in ("plugin.py", "compat.py", "changes.py", "ranks.py", "worker.py"):
            # refusals, the choice of the contract, and lines of the log
            named |= {"release.installed", "release.SERVED", "release.judged_as"}
        assert set(found) <= named, path


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0] = ast.Expr(ast.Constant(None))
    return tree


@pytest.mark.parametrize("found", [*release.SERVED, "0.5.99", None])
def test_an_unknown_release_is_compared_with_the_newest(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    """The doctor can then list what moved."""
    monkeypatch.setattr(release, "installed", lambda: found)
    expected = found if found in release.SERVED else "0.5.23"
    assert release.judged_as() == expected
    assert symbols.of(expected).keys() >= symbols.COMMON.keys()
