"""Two ranks compare every step of a storm, and a rank that parts from the other ends the server."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import requests
import torch

from benchmarks import soak
from sglang_dflash.environment import COMPARE_RANKS
from sglang_dflash.testing.server import SCHEDULES, Server
from sglang_dflash.testing.two_ranks import TwoRanks
from tests.e2e.conftest import SCRIPTED, SHAPE

STEPS = 150

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks of a CPU")


def parted(server: Server, parting: Path, by: str) -> str:
    """Let rank 1 part from rank 0, and return the sentence with which the server ends."""
    parting.write_text(by)
    with contextlib.suppress(requests.RequestException, RuntimeError):
        server.generate([5, 6, 7], rid="asked", max_new_tokens=60, ignore_eos=True)
    assert server.wait_for_exit(60) != 0
    [line] = [line for line in server.log().splitlines() if "This server ends." in line]
    return line


@pytest.fixture
def parting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with which a rank of the servers of a test parts."""
    file = tmp_path / "parting"
    env = {"PYTHONPATH": SCRIPTED, "PARTING": str(file), **SCHEDULES["plan stream"]}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return file


@pytest.mark.long
def test_ranks_agree_in_a_storm_until_one_commits_another_token(parting: Path) -> None:
    """A comparison that never fails would prove nothing."""
    options = soak.parse(["--ranks", "2", "--updates", "0", "--steps", str(STEPS)])
    with soak.serving(options) as pairs:
        report = soak.run(pairs, options)
        [pair] = pairs
        sentence = parted(pair.dflash, parting, "token")
    assert soak.faults(report) == []
    assert report["schedule"] == ["plan stream"]
    [compared] = report["compared_steps"]
    assert compared >= STEPS
    where = f" The ranks of this server parted in step {compared + 1}: the "
    assert f"{where}list of committed tokens of request asked is [" in sentence
    assert "] on rank 0 and [" in sentence and sentence.endswith("] on rank 1. This server ends.")


def test_ranks_of_different_widths_end_before_they_wait_for_each_other(parting: Path) -> None:
    with TwoRanks(*SHAPE, env={COMPARE_RANKS: "1"}) as server:
        sentence = parted(server, parting, "width")
    assert " The ranks of this server parted in step 1: the verify width is " in sentence
