"""How a program ends on Ctrl-C: in one line, with the status that a shell gives it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

INTERRUPTED = 128 + signal.SIGINT


def end_on_interrupt(name: str, work: Callable[[], int | None]) -> int:
    """Run `work` and return its status; on Ctrl-C print one line and return 130."""
    try:
        return work() or 0
    except KeyboardInterrupt:
        # a clock or a bar may have left the cursor in its line
        start = "\n" if sys.stderr.isatty() else ""
        print(f"{start}{name}: stopped", file=sys.stderr)
        return INTERRUPTED
