"""Graceful shutdown on Ctrl-C and SIGTERM, and the resume command. Needs no torch."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sglang_dflash.train.config import Invocation

# argument and result of signal.signal
Handler = Callable[[int, FrameType | None], object] | int | None
STDERR = 2
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the run."""


class Stop:
    """A context manager that handles both signals. The first signal raises `Stopped`, unless it
    arrives inside `let_finish`, whose block polls `asked`; a second one always raises."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._reply: bytes | None = None
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._receive) for number in NAMES}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def let_finish(self, reply: str) -> Iterator[None]:
        """Defer the first signal: the block polls `asked` and ends itself. `reply` is printed."""
        self._reply = reply.encode()
        try:
            yield
        finally:
            self._reply = None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        again = self.asked is not None
        self.asked = signal.Signals(number)
        if again or self._reply is None:
            raise Stopped
        # os.write, because print is not reentrant
        os.write(STDERR, b"\ntrain: " + self._reply + b"\n")


def run_until_stopped(invocation: Invocation, work: Callable[[Stop], int]) -> int:
    """Run `work` and return its exit code; if a signal ends it, print the resume command and
    return 128 plus the signal number, as a shell does."""
    with Stop() as stop:
        try:
            code = work(stop)
        except Stopped:
            code = 0
    if not stop.asked:
        return code
    print(
        f"train: stopped by {NAMES[stop.asked]}; {_kept(invocation.out)}. Continue with:\n"
        f"{resume_command(invocation)}",
        file=sys.stderr,
    )
    return 128 + stop.asked


def resume_command(invocation: Invocation) -> str:
    """Return the command line that continues a run."""
    resume = [] if invocation.continues else ["--resume"]
    python = sys.orig_argv[0]
    return shlex.join([python, "-m", "sglang_dflash", *invocation.command_line, *resume])


def _kept(out: Path) -> str:
    scores = out / "scores.json"
    if (out / "checkpoint.pt").exists() and scores.exists():
        return f"{out} has everything up to step {json.loads(scores.read_text())['step']}"
    if list(out.glob("answers-*")):
        return f"complete answers are kept in {out}"
    return "there was nothing to save yet"
