"""How a program ends on Ctrl-C: in one line, with the status that a shell gives it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


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
    takes_signals = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes_signals:
        signal.signal(signal.SIGINT, receive)
    try:
        return work() or 0
    except BaseException as error:
        # an import that is interrupted may end with an error of its own
        if os.getpid() != own or not received and not isinstance(error, KeyboardInterrupt):
            raise
        # a clock or a bar may have left the cursor in its line
        start = "\n" if sys.stderr.isatty() else ""
        print(f"{start}{name}: stopped", file=sys.stderr)
        return INTERRUPTED
    finally:
        if takes_signals:
            signal.signal(signal.SIGINT, signal.default_int_handler)
