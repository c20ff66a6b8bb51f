"""Grouped bars: a system's speed-up over plain decoding, or its rate, at each load."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import picture_style
from benchmarks.picture_style import (
    COLOURS,
    NAMES,
    SPEED_UP,
    colour_of,
    hatch_of,
    in_order,
    name_of,
)
from benchmarks.systems import kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_PER_ROW = 3
PANEL_INCHES = (4.2, 3.4)
TITLE_LENGTH = 44  # characters
LETTERS_PER_INCH, LINE_INCHES = 16, 0.16  # of a caption
WIDEST_BAR = 0.4  # of a group
LEGEND_INCHES = 2.8  # room for "SGLang's DFLASH, triton attention"
VALUE_INCHES = 0.33  # room for "1.03x"

Line = list[tuple[int, float]]  # requests and rate
Lines = Mapping[str, Line]  # by system


class Bars(NamedTuple):
    """One system's bar in each group of a panel."""

    label: str
    colour: str
    hatch: str
    heights: Sequence[float | None]  # None: not measured
    texts: Sequence[str]


class Panel(NamedTuple):
    title: str
    groups: list[str]
    systems: list[Bars]
    is_speed_up: bool


def speed_up_text(value: float) -> str:
    """Return e.g. "7.67x" or "1.03x", of one width, and "12.3x" from ten on."""
    return f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def rate_text(value: float) -> str:
    return f"{value:.1f}" if value < 100 else str(math.floor(value + 0.5))


def panels_of(rates: Mapping[str, Lines]) -> list[Panel]:
    """Return a panel per title: of speed-ups if each has plain decoding's rate, else of rates."""
    drawn = list(dict.fromkeys(system for lines in rates.values() for system in lines))
    bases = [plain_of(lines) for lines in rates.values()]
    if len(drawn) > 1 and all(bases):
        return [
            speed_ups(title, lines, str(base), drawn)
            for (title, lines), base in zip(rates.items(), bases, strict=True)
        ]
    return [plain_rates(title, lines, drawn) for title, lines in rates.items()]


def plain_of(lines: Lines) -> str | None:
    """Return the system that speed-ups are over, if it was measured."""
    plain = (name for name in lines if kind_of(name) == "plain")
    return next((name for name in plain if any(rate for _, rate in lines[name])), None)


def speed_ups(title: str, lines: Lines, base: str, drawn: list[str]) -> Panel:
    below = {n: rate for n, rate in lines[base] if rate}
    sizes = sorted(below)
    systems = []
    for system in in_order(lines):
        if system != base:
            rates = dict(lines[system])
            heights = [rates[n] / below[n] if n in rates else None for n in sizes]
            texts = ["" if y is None else speed_up_text(y) for y in heights]
            systems.append(bars_of(system, drawn, heights, texts))
    return Panel(title, [f"{n}\n({rate_text(below[n])})" for n in sizes], systems, True)


def plain_rates(title: str, lines: Lines, drawn: list[str]) -> Panel:
    sizes = sorted({n for line in lines.values() for n, _ in line})
    systems = []
    for system in in_order(lines):
        rates = dict(lines[system])
        texts = [rate_text(rates[n]) if n in rates else "" for n in sizes]
        systems.append(bars_of(system, drawn, [rates.get(n) for n in sizes], texts))
    return Panel(title, [str(n) for n in sizes], systems, False)


def bars_of(
    system: str, drawn: list[str], heights: Sequence[float | None], texts: Sequence[str]
) -> Bars:
    return Bars(name_of(system), colour_of(system), hatch_of(system, drawn), heights, texts)


def draw(panels: list[Panel], path: Path, caption: list[str]) -> None:
    """Draw panels of one scale, so that their bars can be compared, above lines of a caption."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(len(panels), PANELS_PER_ROW)
    rows = math.ceil(len(panels) / columns)
    width = max(columns, 2) * PANEL_INCHES[0]
    lines = [textwrap.fill(line, round(width * LETTERS_PER_INCH)) for line in caption if line]
    below = "\n".join(lines)
    height = rows * PANEL_INCHES[1] + LINE_INCHES * (below.count("\n") + 1) + 0.5
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08))
    groups = [max(len(p.groups) for p in panels[i::columns]) for i in range(columns)]
    ratios = [1 + n for n in groups]
    axes = list(figure.subplots(rows, columns, squeeze=False, width_ratios=ratios).flat)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    used = axes[: len(panels)]
    for i, (axis, panel) in enumerate(zip(used, panels, strict=True)):
        draw_panel(axis, panel, inches=width * ratios[i % columns] / sum(ratios))
    top = max(axis.get_ylim()[1] for axis in used)
    for axis in used:
        axis.set_ylim(0, top)
    add_legend(figure)
    picture_style.save(figure, path, below)


def draw_panel(axis: Axes, panel: Panel, *, inches: float) -> None:
    count = len(panel.systems)
    apart = 0.85 * inches / (len(panel.groups) + 0.2) * (bar_width(count) if count > 1 else 1)
    draw_bars(axis, panel.systems, panel.groups, upright=apart < VALUE_INCHES)
    axis.set_title(textwrap.fill(panel.title, TITLE_LENGTH), fontsize=10)
    if panel.is_speed_up:
        draw_plain(axis)
        axis.set_xlabel("concurrent requests\n(plain decoding, tokens/s)", fontsize=9)
        axis.set_ylabel(SPEED_UP, fontsize=9)
    else:
        axis.set_xlabel("concurrent requests", fontsize=9)
        axis.set_ylabel("decoded tokens per second", fontsize=9)


def draw_plain(axis: Axes) -> None:
    """Mark the speed of plain decoding, behind the bars."""
    axis.axhline(1.0, color=COLOURS["plain"], linewidth=1, zorder=0, label=NAMES["plain"])


def bar_width(count: int) -> float:
    """Return the room of a bar in a group of `count`, which is 1 wide."""
    return min(0.8 / max(count, 1), WIDEST_BAR)


def draw_bars(axis: Axes, systems: list[Bars], groups: list[str], *, upright: bool = False) -> None:
    """Draw a bar per system in each group, from zero, with its text above it."""
    from matplotlib.patheffects import withStroke

    width = bar_width(len(systems))
    for i, bars in enumerate(systems):
        shift = (i - (len(systems) - 1) / 2) * width
        known = [(x, y) for x, y in enumerate(bars.heights) if y is not None]
        drawn = axis.bar(
            [x + shift for x, _ in known],
            [y for _, y in known],
            width=0.94 * width,
            color=bars.colour,
            hatch=bars.hatch,
            edgecolor="white",
            label=bars.label,
        )
        texts = [bars.texts[x] for x, _ in known]
        # readable where the line of plain decoding passes behind
        glow = [withStroke(linewidth=2, foreground="white")]
        turn = 90 if upright else 0
        axis.bar_label(
            drawn, texts, fontsize=8, padding=2, rotation=turn, path_effects=glow, zorder=3
        )
    axis.set_xticks(range(len(groups)), groups, fontsize=9)
    axis.set_xlim(-0.6, len(groups) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
    highest = max((y for bars in systems for y in bars.heights if y is not None), default=1.0)
    axis.set_ylim(0, (1.25 if upright else 1.12) * max(highest, 1.0))


def add_legend(figure: Figure) -> None:
    """Name each system once, above all panels."""
    found: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside upper center",
        ncols=min(len(found), int(figure.get_figwidth() / LEGEND_INCHES)),
        fontsize=9,
        frameon=False,
    )
