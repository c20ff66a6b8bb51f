"""The picture of `report --png`: read by people who did not draw it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from sglang_dflash.__main__ import main
from sglang_dflash.commands.counts import Counts
from sglang_dflash.commands.report import ACCEPT_COLOUR, COLOUR, Look, draw, save
from tests.saved_figures import saved_figures

URL = "http://127.0.0.1:30000"


def look(at: float, committed: int) -> Look:
    counts = Counts(steps=40, committed=committed, histogram=[10, 20, 10])
    return Look(at, counts, 2.5, [0.75, 0.25], 0)


def drawn(looks: list[Look], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """Return the figure that is saved."""
    figures = saved_figures(monkeypatch)
    draw(looks, tmp_path / "report.png", URL)
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


def test_a_restart_while_watching_is_no_negative_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts from zero again: 10 tokens in two seconds, not 990 fewer than before."""
    figure = drawn([look(0, 0), look(2, 1000), look(4, 10)], tmp_path, monkeypatch)
    assert figure.axes[2].lines[0].get_ydata().tolist() == [500, 5]


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


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere/report.png", "nowhere. Make it, or pass a file in another one."),
        ("report.txt", "ends with .txt, but pictures are drawn as"),
        ("report", "ends with no suffix, but pictures are drawn as"),
        ("", "ends with no suffix"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_first_look(
    tmp_path: Path, name: str, told: str
) -> None:
    """No server runs here: it would be asked first, and the picture lost hours later."""
    with pytest.raises(SystemExit) as ended:
        main(["report", "--url", "127.0.0.1:1", "--png", str(tmp_path / name)])
    message = str(ended.value.code)
    assert message.startswith(f"--png {tmp_path / name} ") and told in message


def test_a_picture_without_matplotlib_is_refused_before_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(SystemExit, match="needs matplotlib, which .* does not have. Install"):
        main(["report", "--url", "127.0.0.1:1", "--png", "report.png"])


def test_a_folder_in_the_pictures_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.png").mkdir()
    with pytest.raises(SystemExit, match="report.png is a folder. Pass the path of a file."):
        main(["report", "--url", "127.0.0.1:1", "--png", str(tmp_path / "report.png")])


def test_a_picture_that_is_lost_at_the_end_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is gone by then; on Ctrl-C nothing else would say so."""
    path = tmp_path / "gone" / "report.png"
    assert not save([look(0, 5)], path, URL)
    assert f"--png {path} was not written: No such file" in capsys.readouterr().err
