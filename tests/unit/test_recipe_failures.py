"""How benchmarks/recipes.py ends when a server did not run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipes


def test_cells_that_failed_are_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that goes on after it would otherwise publish a table with holes."""

    def run_group(cells: list[recipes.Cell], *_: Any, **__: Any) -> Iterator[Any]:
        for cell in cells:
            yield cell, {"error": "did not start"} if cell.system == fails else {}

    monkeypatch.setattr(recipes, "run_group", run_group)
    monkeypatch.setattr(recipes.Results, "text", lambda _: "the table")
    words = ["recipes", "--recipes", "qwen3-4b", "--out", str(tmp_path / "r")]
    monkeypatch.setattr("sys.argv", words)
    fails = "in-tree"
    with pytest.raises(SystemExit) as ended:
        recipes.main()
    assert ended.value.code == 1
    # an earlier failure is one until it is tried again
    with pytest.raises(SystemExit):
        recipes.main()
    fails = ""
    monkeypatch.setattr("sys.argv", [*words, "--retry"])
    recipes.main()
