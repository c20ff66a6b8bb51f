"""Show two systems answering one question in the terminal, in two columns.

They answer one after the other, so that neither takes time from the other. The first streams alone;
while the second streams, the first is replayed beside it at the pace that it had.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_dflash.testing.stream import Answer, Piece, show

# narrower columns wrap every few words
LEAST_WIDTH = 90
FRAME_S = 0.1
GAP = 3  # between the columns
# lines of a frame that are not answer: heading, speeds, and the prompt of the shell
OTHER_LINES = 4
ACCEPTED = "green"
BAR_WIDTH = 40  # characters of the longest bar, if there is room
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass
class Told:
    """An answer as it arrived."""

    name: str
    answer: Answer = field(default_factory=Answer)
    pieces: list[tuple[float, Piece]] = field(default_factory=list)  # seconds after the request
    seconds: float = 0.0  # until it was complete; 0 before

    @property
    def rate(self) -> float:
        return self.answer.tokens / self.seconds

    def hear(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Pass the pieces on, and take them in with their times."""
        began = time.monotonic()
        for piece in pieces:
            self.pieces.append((time.monotonic() - began, piece))
            yield piece
        self.seconds = time.monotonic() - began

    def text(self, until: float = math.inf) -> Text:
        """Return what had arrived after so many seconds, accepted drafts in colour."""
        found = Text()
        for at, piece in self.pieces:
            if at > until:
                break
            found.append(piece.text, style=ACCEPTED if piece.accepted else "")
        return found

    def speed(self, until: float = math.inf) -> Text:
        """Return the system's name with its speed so far."""
        if self.seconds and until >= self.seconds:
            return Text.assemble(
                (self.name, "bold"),
                f"  {self.rate:.1f} tokens/s, {self.answer.tokens} tokens in {self.seconds:.1f} s",
            )
        arrived = [at for at, _ in self.pieces if at <= until]
        if not arrived:
            return Text(self.name, style="bold dim")
        so_far = f"  {len(arrived) / max(arrived[-1], 1e-9):.1f} tokens/s"
        return Text.assemble((self.name, "bold"), so_far, (" (replay)" if self.seconds else ""))


def tell_both(
    console: Console,
    first: Told,
    second: Told,
    *,
    ask: Callable[[Told], Iterator[Piece]],
) -> None:
    """Ask both systems in turn, and show the answers side by side as they stream; one below the
    other without a terminal, or in a narrow one."""
    if not console.is_terminal or console.width < LEAST_WIDTH:
        for told in (first, second):
            print(f"{told.name}:")
            show(told.hear(ask(told)), colour=console.is_terminal)
            print(f"({told.rate:.1f} tokens/s, {told.answer.tokens} tokens)")
        return
    with Live(console=console, auto_refresh=False) as live:
        screen = _Screen(live, console, first, second)
        for told in (first, second):
            for _ in told.hear(ask(told)):
                screen.draw()
        screen.draw(whole=True)


@dataclass
class _Screen:
    live: Live
    console: Console
    first: Told
    second: Told
    drawn_at: float = 0.0

    def draw(self, *, whole: bool = False) -> None:
        """Draw a frame, unless the last one is recent; the end of the answers only, unless
        `whole`."""
        now = time.monotonic()
        if not whole and now - self.drawn_at < FRAME_S:
            return
        self.drawn_at = now
        # the first is replayed up to the time that the second has taken
        until = math.inf
        if self.second.pieces and not whole:
            until = self.second.pieces[-1][0]
        lines = None if whole else max(3, self.console.height - OTHER_LINES)
        width = (self.console.width - GAP) // 2
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=width)
        grid.add_column(width=width)
        grid.add_row(self.first.speed(until), self.second.speed())
        grid.add_row(
            *(
                self._last_lines(text, width, lines)
                for text in (self.first.text(until), self.second.text())
            )
        )
        # the last one, however tall, is drawn when Live ends
        self.live.update(grid, refresh=not whole)

    def _last_lines(self, text: Text, width: int, lines: int | None) -> Text:
        """Return what fits: a frame that is taller than the terminal cannot be redrawn."""
        if lines is None:
            return text
        return Text("\n").join(list(text.wrap(self.console, width))[-lines:])


def bars(
    values: dict[str, float], *, room: int, texts: dict[str, str], styles: dict[str, str]
) -> Table:
    """Return a bar for each value, from zero, in its style, with its text behind, in lines of
    `room` characters: where that is little, bars are short, and names and texts whole."""
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True)
    longest = max(values.values(), default=0.0) or 1.0
    names = {name: f"  {name}" for name in values}
    # and a space behind each column
    beside = max(map(len, names.values()), default=0) + max(map(len, texts.values()), default=0) + 3
    width = max(1, min(BAR_WIDTH, room - beside))
    for name, value in values.items():
        drawn = Text(bar(value / longest, width), style=styles[name])
        table.add_row(names[name], drawn, texts[name])
    return table


def bar(share: float, width: int) -> str:
    """Return a bar of a share of `width` characters, to an eighth of one."""
    eighths = round(8 * width * share)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
