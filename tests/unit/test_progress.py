"""Progress bars of the benchmarks: the remaining time in a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest
import torch

from sglang_dflash.testing import progress as bars
from sglang_dflash.testing.progress import Progress, say
from sglang_dflash.train.batches import Batch
from sglang_dflash.train.trainer import Schedule, optimise

PATIENCE_S = 30


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
    assert re.search(r"1/4 points \[00:\d\d<00:\d", shown.getvalue())
    assert "ours at 8" in shown.getvalue()
    # parts that were left out count as done, and none twice
    assert "9/4" not in shown.getvalue()


def test_the_clock_moves_while_a_part_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that stands still for minutes looks like a program that hangs."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(bars, "REDRAW_S", 0.05)
    end = time.monotonic() + PATIENCE_S
    with Progress(4, "points"):
        while not re.search(r"0/4 points \[00:0[1-9]", shown.getvalue()):
            assert time.monotonic() < end, shown.getvalue()
            time.sleep(0.05)
    assert clocks() == []
    # the bar is gone, and nothing is drawn in its place
    ended = shown.getvalue()
    time.sleep(0.2)
    assert shown.getvalue() == ended and ended.endswith("\r")


def test_training_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    layer, batches = torch.nn.Linear(2, 2), itertools.repeat(torch.ones(1, 2))
    optimise(
        layer,
        cast("Iterator[Batch]", batches),
        loss_of=lambda batch: layer(batch).sum(),
        schedule=Schedule(steps=3),
        label="target",
    )
    assert re.search(r"target +0%\|.*\| 00:00<\?", shown.getvalue())
    assert shown.getvalue().endswith("\r")


def test_a_log_has_the_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    """A bar in a file is one line for every frame."""
    with Progress(1, "points"):
        assert clocks() == []
    run()
    captured = capsys.readouterr()
    assert captured.out == "plain: 12 tokens/s\n" and captured.err == ""


def clocks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "progress"]
