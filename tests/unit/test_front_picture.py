"""The README's picture: every number and label in it comes from the result files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.front_picture import (
    RESULTS,
    about,
    left_bars,
    point_name,
    points_of,
    simulated_length,
)
from benchmarks.picture_style import COLOURS, name_of, style_of
from sglang_dflash.commands import report
from sglang_dflash.testing.server import ROOT


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


SERVING, NEWEST = read("serving-h200"), read("serving-0.5.23-h200")
LOAD = read("load-gemma4-31b-h200")


def test_bars_are_the_ratios_of_the_readme() -> None:
    """The table and the picture beside it must not contradict each other."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith(("| 512 |", "| 32768 |"))
    ]
    bars = left_bars(SERVING, NEWEST, "in-tree-fa4")
    assert [f"{height:.1f}x" for height in bars[0].heights] == [row[8] for row in rows]
    for (ours, theirs), column in ((bars[:2], 7), (bars[2:], 4)):
        over = [f"{a / b:.2f}x" for a, b in zip(ours.heights, theirs.heights, strict=True)]
        assert over == [row[column] for row in rows]
    names = [point_name(*key) for key in points_of(SERVING, "plain")]
    assert names == [
        "1\n(512 context)",
        "8\n(512 context)",
        "32\n(512 context)",
        "1\n(32K context)",
    ]


def test_the_picture_says_how_it_was_measured() -> None:
    bars = left_bars(SERVING, NEWEST, "in-tree-fa4")
    assert [one.label for one in bars] == [
        "sglang_dflash (SGLang 0.5.17)",
        "SGLang's DFLASH (SGLang 0.5.17)",
        "sglang_dflash (SGLang 0.5.23, separate call)",
        "SGLang's DFLASH (SGLang 0.5.23, FA4, that call)",
    ]
    text = about(SERVING, LOAD, NEWEST, bars)
    for part in ("gemma4-31b", "random weights", "NVIDIA H200", "Acceptance is simulated"):
        assert part in text
    assert "* in one batch only 29 of 32 requests ran at once" in text
    assert simulated_length(SERVING) == "8"
    with pytest.raises(SystemExit):
        simulated_length({"command": "python -m benchmarks.serving"})


def test_the_command_draws_it(tmp_path: Path) -> None:
    out = tmp_path / "front.png"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.front_picture", "--out", out], cwd=ROOT, check=True
    )
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_system_has_one_colour_whatever_its_variant() -> None:
    drawn = ["plain", "in-tree", "in-tree-fa4", "ours"]
    styles = [style_of(system, drawn) for system in drawn]
    assert [style["color"] for style in styles] == [
        COLOURS[kind] for kind in ("plain", "in-tree", "in-tree", "ours")
    ]
    assert styles[1]["linestyle"] != styles[2]["linestyle"]
    assert COLOURS["ours"] == report.COLOUR
    assert name_of("in-tree-fa4") == "SGLang's DFLASH, fa4"
