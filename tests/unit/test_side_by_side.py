"""What the demo shows of two answers that arrive one after the other, and of their speed."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rich.color import Color, ColorSystem
from rich.console import Console

from benchmarks.picture_style import COLOURS
from launch import demo
from sglang_dflash.testing import side_by_side
from sglang_dflash.testing.side_by_side import Told, bar, bars, tell_both
from sglang_dflash.testing.stream import Piece

GREEN_DRAFT = "\033[32m a hare\033[0m"
CONTROL = re.compile(r"\033\[[0-9;?]*[A-Za-z]")


def answer(told: Told, words: int = 1) -> Iterator[Piece]:
    told.answer.token_ids = list(range(2 * words))
    for _ in range(words):
        yield Piece("Once", False)
        yield Piece(" a hare", told.name == "drafting")


def shown(width: int, *, terminal: bool, words: int = 1, height: int = 24) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=width, height=height, _environ={"TERM": "xterm"}
    )
    tell_both(console, Told("plain"), Told("drafting"), ask=lambda told: answer(told, words))
    return out.getvalue()


def test_a_wide_terminal_has_both_answers_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a busy machine a pause would be part of an answer's time
    clock = SimpleNamespace(monotonic=itertools.count(step=1e-4).__next__)
    monkeypatch.setattr(side_by_side, "time", clock)
    screen = shown(100, terminal=True)
    assert GREEN_DRAFT in screen
    [*_, speeds, answers] = CONTROL.sub("", screen).rstrip().splitlines()
    assert re.fullmatch(
        r"plain  [\d.]+ tokens/s, 2 tokens in 0\.0 s +drafting  .* 0\.0 s *", speeds
    )
    assert answers.split() == ["Once", "a", "hare"] * 2


@pytest.mark.parametrize(("width", "terminal"), [(100, False), (60, True)], ids=["piped", "narrow"])
def test_elsewhere_one_stands_below_the_other(
    width: int, terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(width, terminal=terminal)
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[1], lines[3]] == ["plain:", "Once a hare", "drafting:"]
    draft = GREEN_DRAFT if terminal else "⟦ a hare⟧"
    assert lines[4] == f"Once{draft}"


def test_frames_show_the_end_of_an_answer_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rich would cut off the end, which is where text arrives, and put an ellipsis there."""
    monkeypatch.setattr("sglang_dflash.testing.side_by_side.FRAME_S", 0.0)
    # 30 lines in a column of 48 characters
    assert "..." not in shown(100, terminal=True, words=120, height=10)


def test_lines_are_wrapped_to_the_width_of_their_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is wider than its column is wrapped again, and every other line is short."""
    monkeypatch.setattr("sglang_dflash.testing.side_by_side.FRAME_S", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=101, _environ={"TERM": "xterm"})

    def ask(told: Told) -> Iterator[Piece]:
        told.answer.token_ids = [1]
        yield Piece("x" * 49, False)

    tell_both(console, Told("plain"), Told("drafting"), ask=ask)
    assert {len(run) for run in re.findall("x+", out.getvalue())} == {49}


def test_the_first_answer_is_replayed_at_the_pace_it_had() -> None:
    told = Told("plain", pieces=[(0.5, Piece("One", False)), (1.5, Piece(" two", False))])
    told.answer.token_ids, told.seconds = [1, 2], 2.0
    assert told.text(1.0).plain == "One"
    assert told.speed(1.0).plain == "plain  2.0 tokens/s (replay)"
    assert told.text().plain == "One two"
    assert told.speed().plain == "plain  1.0 tokens/s, 2 tokens in 2.0 s"


def test_bars_are_proportional_to_their_values() -> None:
    lengths = [len(bar(share, 40)) for share in (0.0, 0.25, 0.5, 1.0)]
    assert lengths == [0, 10, 20, 40]
    assert bar(1 / 16, 4) == "▎"


@pytest.mark.parametrize(("room", "longest"), [(120, 40), (60, 22), (30, 1)])
def test_names_and_texts_of_bars_stay_whole_in_a_narrow_terminal(room: int, longest: int) -> None:
    texts = {"plain decoding": "9.5 tokens/s", "DFLASH": "19.0 tokens/s, 2.0x"}
    console = Console(width=max(room, 40), file=io.StringIO())
    values = {"plain decoding": 9.5, "DFLASH": 19.0}
    console.print(bars(values, room=room, texts=texts, styles=dict.fromkeys(values, "")))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2
    for line, (name, text) in zip(lines, texts.items(), strict=True):
        assert line.startswith(f"  {name} ") and text in line
    assert lines[1].count("█") == longest


def reported(terminal: bool, **environ: str) -> str:
    """Return the demo's bars for DFLASH at twice the speed of plain decoding."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=100, _environ={"TERM": "xterm-256color", **environ}
    )
    told = {demo.PLAIN: Told(demo.PLAIN, seconds=2.0), demo.DFLASH: Told(demo.DFLASH, seconds=1.0)}
    for one in told.values():
        one.answer.token_ids = [1, 2, 3, 4]
    histograms = [{"histogram": [0, 0]}, {"histogram": [1, 1]}]
    demo.report(console, {name: [one] for name, one in told.items()}, *histograms)
    return out.getvalue()


def test_speeds_have_the_colours_that_the_systems_have_in_pictures() -> None:
    grey = Color.parse(COLOURS["plain"]).downgrade(ColorSystem.EIGHT_BIT).get_ansi_codes()
    screen = reported(terminal=True)
    assert re.search(rf"plain decoding \033\[{';'.join(grey)}m█{{20}} *\033\[0m ", screen)
    assert re.search(r"DFLASH +\033\[32m█{40}\033\[0m ", screen)


@pytest.mark.parametrize(
    ("terminal", "environ"), [(False, {}), (True, {"NO_COLOR": "1"})], ids=["piped", "NO_COLOR"]
)
def test_bars_have_colours_only_where_they_are_wanted(
    terminal: bool, environ: dict[str, str]
) -> None:
    assert f"plain decoding {'█' * 20} " in reported(terminal, **environ)
