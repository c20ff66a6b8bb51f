"""A progress bar with the remaining time, below the lines that a program prints meanwhile."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Self

from tqdm import tqdm

REDRAW_S = 1.0


class Progress:
    """A bar on stderr while the block runs; none without a terminal, where it would fill a log.

    `with Progress(12, "points") as progress: ...`. Its clock also moves while a part takes long.
    """

    def __init__(self, total: float, unit: str, *, what: str | None = None) -> None:
        shape = "{l_bar}{bar}| {n:.0f}/{total:.0f} " + unit + " [{elapsed}<{remaining}{postfix}]"
        # leave=False: results follow in its place
        self._bar = tqdm(
            total=total, desc=what, disable=None, leave=False, dynamic_ncols=True, bar_format=shape
        )
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._redraw, daemon=True, name="progress")

    def __enter__(self) -> Self:
        if not self._bar.disable:
            self._clock.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._clock.is_alive():
            # not for ever: Ctrl-C within a redraw leaves tqdm's lock taken
            self._clock.join(timeout=1)
        self._bar.close()

    def step(self, what: str | None = None) -> None:
        """Count one part as done; `what` comes next."""
        self._bar.update()
        if what is not None:
            self.name(what)

    def name(self, what: str) -> None:
        """Say what is being done."""
        self._bar.set_postfix_str(what)

    def reach(self, done: float) -> None:
        """Count parts up to `done` as done, those that were left out included."""
        self._bar.update(max(min(done, self._bar.total) - self._bar.n, 0))

    def _redraw(self) -> None:
        while not self._ended.wait(REDRAW_S):
            self._bar.refresh()


def say(line: str) -> None:
    """Print a line above the bar, if there is one."""
    tqdm.write(line)
    sys.stdout.flush()
