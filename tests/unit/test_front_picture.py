"""The README's picture: every number and label in it comes from the result files."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from benchmarks.front_picture import (
    RESULTS,
    about,
    draw,
    left_bars,
    length_of,
    point_name,
    points_of,
)
from benchmarks.picture_style import COLOURS
from sglang_dflash.testing.server import ROOT
from tests.saved_figures import saved_figures


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
        "sglang_dflash (SGLang 0.5.23)",
        "SGLang's DFLASH (SGLang 0.5.23, FA4)",
    ]
    assert about(SERVING, LOAD, NEWEST, "in-tree-fa4") == [
        "gemma4-31b shapes with random weights on one NVIDIA H200, decode only. Acceptance "
        "simulated at 8 tokens per step (left), and at the lengths named (right).",
        "Plain decoding and solid bars: SGLang 0.5.17, commit a884790. Hatched: SGLang 0.5.23, "
        "commit b764f0e, a separate call. Right: SGLang 0.5.17, commit 4d70ac3.",
        "* in one batch only 29 of 32 requests ran at once",
    ]
    assert bars[1].texts[2] == "1.8x*"
    with pytest.raises(SystemExit):
        length_of({"command": "python -m benchmarks.serving"})


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    out = tmp_path_factory.mktemp("pictures") / "front.png"
    with pytest.MonkeyPatch.context() as patch:
        saved = saved_figures(patch)
        draw(SERVING, NEWEST, "in-tree-fa4", LOAD, out)
    return saved[0]


def test_both_panels_begin_at_zero_with_named_axes(figure: Figure) -> None:
    for axis in figure.axes:
        assert axis.get_ylim()[0] == 0
        assert axis.get_ylabel() == "speed-up over plain decoding"
        assert axis.get_xlabel() == "concurrent requests"


def test_systems_have_their_colours_in_both_panels(figure: Figure) -> None:
    left, right = figure.axes
    bars = [each for each in left.containers if isinstance(each, BarContainer)]
    ours, theirs, plain = COLOURS.values()
    assert [to_hex(each.patches[0].get_facecolor()) for each in bars] == [ours, theirs] * 2
    assert [to_hex(line.get_color()) for line in left.lines] == [plain]
    assert [to_hex(line.get_color()) for line in right.lines] == [ours, ours, ours, plain]


def test_no_value_covers_another_or_the_legend(figure: Figure) -> None:
    left = figure.axes[0]
    legend = left.get_legend()
    assert legend is not None
    boxes = [each.get_window_extent() for each in [*left.texts, legend]]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)


def test_the_command_draws_it(tmp_path: Path) -> None:
    out = tmp_path / "front.png"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.front_picture", "--out", out], cwd=ROOT, check=True
    )
    assert out.read_bytes().startswith(b"\x89PNG")
