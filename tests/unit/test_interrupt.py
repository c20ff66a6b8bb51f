"""How the commands end on Ctrl-C."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import subprocess
import sys

import pytest

from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.testing.server import ROOT

ANSWER_TIMEOUT_S = 60


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
