"""How a program ends on Ctrl-C: in one line, with the status that a shell gives it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def end_imports_on_interrupt() -> None:
    """End a program that `python -m` is starting in the same way while it imports, which takes
    seconds, until `end_on_interrupt` takes over. For a package of programs."""
    # what argv begins with until the program has been found
    is_starting = sys.argv[0] == "-m"
    if is_starting and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_imports)


def _end_imports(_number: int, _frame: FrameType | None) -> None:
    program = sys.orig_argv[-len(sys.argv)].removeprefix("-m").rpartition(".")[2]
    # a module may take an exception for a failed import, and nothing has begun that is to be ended
    os.write(sys.stderr.fileno(), f"{_new_line()}{program}: stopped\n".encode())
    os._exit(INTERRUPTED)


def _new_line() -> str:
    """Return what ends a line in which the cursor may be: a clock or a bar may have left it there,
    and a terminal shows ^C."""
    return "\n" if sys.stderr.isatty() else ""


def end_on_interrupt(name: str, work: Callable[[], int | None]) -> int:
    """Run `work` and return its status; on Ctrl-C print one line and return 130."""
    received: list[int] = []
    own = os.getpid()

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if os.getpid() != own:
            # a forked child has nothing to say
            raise SystemExit(INTERRUPTED)
        raise KeyboardInterrupt

    # a shell starts background jobs with the signal ignored
    takes_signals = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _end_imports)
    if takes_signals:
        signal.signal(signal.SIGINT, receive)
    try:
        return work() or 0
    except BaseException as error:
        # an import that is interrupted may end with an error of its own
        if os.getpid() != own or not received and not isinstance(error, KeyboardInterrupt):
            raise
        print(f"{_new_line()}{name}: stopped", file=sys.stderr)
        return INTERRUPTED
    finally:
        if takes_signals:
            signal.signal(signal.SIGINT, signal.default_int_handler)
