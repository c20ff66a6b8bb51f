"""The picture of `report --png`: read by people who did not draw it."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from sglang_dflash.commands.report import ACCEPT_COLOUR, COLOUR, Look, draw
from tests.saved_figures import saved_figures

URL = "http://127.0.0.1:30000"


def look(at: float, committed: int) -> Look:
    return Look(at, committed, 2.5, [10, 20, 10], [0.75, 0.25], 0)


def drawn(looks: list[Look], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """Return the figure that is saved."""
    figures = saved_figures(monkeypatch)
    draw(looks, str(tmp_path / "report.png"), URL)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    return figures[0]


def test_every_axis_begins_at_zero_and_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn([look(0, 0), look(2, 100), look(4, 300)], tmp_path, monkeypatch)
    for axis in figure.axes:
        assert axis.get_ylim()[0] == 0 and axis.get_xlabel() and axis.get_ylabel()
    assert figure.axes[2].lines[0].get_ydata().tolist() == [50, 100]
    assert figure.get_suptitle().startswith(f"{URL}, ")
    assert "40 verify steps" in figure.get_suptitle()


def test_acceptance_and_speed_have_the_colours_of_the_live_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, positions, speed = drawn([look(0, 0), look(2, 100)], tmp_path, monkeypatch).axes
    bars = [*steps.patches, *positions.patches]
    assert {to_hex(bar.get_facecolor()) for bar in bars} == {ACCEPT_COLOUR}
    assert to_hex(speed.lines[0].get_color()) == COLOUR


@pytest.mark.parametrize("looks", [[look(0, 5)], [look(0, 5), look(2, 5)]], ids=["one", "idle"])
def test_an_idle_server_has_a_speed_of_zero(
    looks: list[Look], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn(looks, tmp_path, monkeypatch)
    low, high = figure.axes[2].get_ylim()
    assert low == 0 < high
