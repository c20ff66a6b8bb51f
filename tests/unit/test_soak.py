"""What benchmarks/soak.py refuses, and how it ends; tests/e2e/test_soak.py runs it."""

from __future__ import annotations

import functools
import queue
import signal
import threading
import time
from typing import Any

import pytest

from benchmarks import soak, soak_storm
from benchmarks.soak_requests import Answer
from sglang_dflash.interrupt import end_on_interrupt

REQUEST_S = 120


@pytest.mark.parametrize(
    "words",
    [
        "--updates -1",
        "--seconds -1",
        "--concurrency 0",
        "--max-running 0",
        "--pool 0",
        "--chunk -1",
    ],
)
def test_a_storm_of_nothing_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--updates -1` would otherwise send no request, and find no fault."""
    with pytest.raises(SystemExit):
        soak.parse(words.split())
    assert f"error: {words}: pass " in capsys.readouterr().err


class Stuck:
    """A server that answers nothing until it is stopped."""

    url, pid = "", 0

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.asked: queue.Queue[str] = queue.Queue()

    def wait(self) -> None: ...

    def stop(self) -> None:
        self.stopped.set()


def test_the_storm_ends_on_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads do not get the signal, and are waited for: for minutes, if they went on."""
    pair = soak_storm.Pair(Stuck(), Stuck())  # type: ignore[arg-type]
    sent: list[str] = []

    def answer(*_: Any, **__: Any) -> Answer:
        sent.append("a request")
        pair.plain.asked.put("a request")  # type: ignore[attr-defined]
        pair.plain.stopped.wait(REQUEST_S)  # type: ignore[attr-defined]
        raise ValueError("the server is gone")

    def interrupt(*_: Any, **__: Any) -> Any:
        pair.plain.asked.get()  # type: ignore[attr-defined]
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(soak_storm, "STOPPED", stopped := threading.Event())
    monkeypatch.setattr(soak, "STOPPED", stopped)
    monkeypatch.setattr(soak_storm, "answer", answer)
    monkeypatch.setattr(soak, "encode_questions", lambda: [[1, 2, 3]])
    monkeypatch.setattr(soak, "warm_up", lambda *_: None)
    # in the place where the main thread waits
    monkeypatch.setattr(soak, "wait", interrupt)
    began = time.monotonic()
    options = soak.parse(["--concurrency", "2"])
    assert end_on_interrupt("soak", functools.partial(soak.run, [pair], options)) == 130
    assert time.monotonic() - began < REQUEST_S / 2
    # none after those that were under way
    assert len(sent) <= 2 and pair.dflash.stopped.is_set()  # type: ignore[attr-defined]
