"""Progress bars of the benchmarks: the remaining time in a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from sglang_dflash.testing.progress import Progress, say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run() -> None:
    with Progress(4, "points") as progress:
        progress.step("ours at 8")
        say("plain: 12 tokens/s")
        progress.reach(3)
        progress.reach(9)


def test_a_terminal_has_a_bar_with_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("tqdm.std.tqdm.mininterval", 0, raising=False)
    run()
    assert "0/4 points [00:00<?" in shown.getvalue()
    assert "1/4 points [00:00<00:0" in shown.getvalue() and "ours at 8" in shown.getvalue()
    # parts that were left out count as done, and none twice
    assert "9/4" not in shown.getvalue()


def test_a_log_has_the_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    """A bar in a file is one line for every frame."""
    run()
    captured = capsys.readouterr()
    assert captured.out == "plain: 12 tokens/s\n" and captured.err == ""
