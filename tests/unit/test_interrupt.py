"""How the commands end on Ctrl-C."""

from __future__ import annotations

import argparse
import ast
import functools
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compile_sweep
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.testing.progress import Progress
from sglang_dflash.testing.server import ROOT
from tests.program_files import program_files
from tests.smoke import run as smoke
from tests.smoke.families import Family

ANSWER_TIMEOUT_S = 60
WORK_S = 120
# has nothing to wait for
WITHOUT_WAITING = {Path("tests/smoke/since.py")}


def test_a_command_that_waits_for_a_server_ends_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(ANSWER_TIMEOUT_S)
        port = server.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_dflash", "report", "--url", f"http://127.0.0.1:{port}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = server.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            printed, error = process.communicate(timeout=ANSWER_TIMEOUT_S)
    assert (process.returncode, printed, error) == (130, "", "report: stopped\n")


def test_the_status_is_that_of_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert end_on_interrupt("some", lambda: 3) == 3
    assert end_on_interrupt("some", lambda: None) == 0
    assert end_on_interrupt("some", interrupt) == 130
    assert capsys.readouterr().err == "some: stopped\n"


def test_an_import_that_fails_for_the_signal_is_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """transformers reports an interrupted import as a module that is not there."""

    def import_something() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ModuleNotFoundError("no module") from None
        return 0

    assert end_on_interrupt("some", import_something) == 130
    assert capsys.readouterr().err == "some: stopped\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("program", ["benchmarks.load", "tests.smoke.run"])
def test_a_program_that_still_imports_ends_in_one_line(program: str, tmp_path: Path) -> None:
    """Imports take seconds, in which a user finds out that an option is missing."""
    slow = "import signal\nsignal.raise_signal(signal.SIGINT)\nprint('was not ended')\n"
    for module in ("numpy", "torch"):
        (tmp_path / f"{module}.py").write_text(slow)
    done = subprocess.run(
        [sys.executable, "-m", program, "--port", "1"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    name = program.rpartition(".")[2]
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{name}: stopped\n")


@pytest.mark.parametrize("path", program_files(), ids=str)
def test_every_program_ends_on_an_interrupt(path: Path) -> None:
    """A traceback of twenty lines would otherwise be what a user gets for Ctrl-C."""
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call)
    }
    assert ("end_on_interrupt" in calls) == (path not in WITHOUT_WAITING)


@pytest.mark.parametrize("waits_in", ["as_completed", "wait_for_room"])
def test_the_smoke_test_ends_its_families(monkeypatch: pytest.MonkeyPatch, waits_in: str) -> None:
    """Their threads do not get the signal, and are waited for: for minutes, if they went on."""
    begun: queue.Queue[str] = queue.Queue()
    ended: list[str] = []

    def run_family(family: Family, **_: Any) -> None:
        begun.put(family.name)
        smoke.STOPPED.wait(WORK_S)
        ended.append(family.name)
        smoke.end_if_stopped()

    def interrupt(_running: object) -> None:
        begun.get()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(smoke, "STOPPED", threading.Event())
    monkeypatch.setattr(smoke, "run_family", run_family)
    # in a place where the main thread waits
    monkeypatch.setattr(smoke, waits_in, interrupt)
    options = argparse.Namespace(families=["gemma4", "qwen3"], at_once=1, tp=1)
    options.no_recipe = waits_in == "as_completed"
    work = functools.partial(smoke.run_all, options, Progress(2, "parts"), lambda _kept: None)
    assert end_on_interrupt("smoke", work) == 130
    # the other one did not begin
    assert (ended, begun.qsize()) == (["gemma4"], 0)


def test_the_compile_sweep_ends_its_workers() -> None:
    """What they compile for the next card takes ten minutes, for which the pool would wait. They
    inherit what this process does about SIGTERM."""
    began, before = time.monotonic(), signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            ProcessPoolExecutor(1) as pool,
            compile_sweep.ending_workers(),
        ):
            pool.map(time.sleep, [WORK_S, WORK_S])
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - began < WORK_S


def test_a_forked_process_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """A terminal sends Ctrl-C to SGLang's processes, too, and each would print a traceback."""

    def fork() -> int | None:
        child = multiprocessing.get_context("fork").Process(
            target=signal.raise_signal, args=(signal.SIGINT,)
        )
        child.start()
        child.join()
        return child.exitcode

    assert end_on_interrupt("some", fork) == 130
    assert capfd.readouterr() == ("", "")
