"""Live acceptance and verify width of a running server, as a terminal chart and as an image."""

from __future__ import annotations

import argparse
import itertools
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.commands.ask import NoReport, ask, full_url, understanding
from sglang_dflash.commands.counts import Counts
from sglang_dflash.metrics import together
from sglang_dflash.train.output_file import check_writable

LINE_LENGTH = 100
# steps that the host needs about the same time for (sglang_dflash/host_times.py)
HOST_KINDS = {
    "plain": "no drafts",
    "repeated": "several passes without drafts",
    "uniform": "equal widths",
    "shared": "shared rows",
}
# tests keep both equal to those of the page (live.html), and the first to that of sglang_dflash in
# all pictures (benchmarks/picture_style.py)
COLOUR = "#1b7f4d"  # of speed
ACCEPT_COLOUR = "#2463c9"


@dataclass(frozen=True)
class Look:
    """A snapshot of a server's acceptance and verify width."""

    at: float  # seconds
    counts: Counts
    accept_length: float
    position_rates: list[float]
    alarms: int
    details: list[str] = field(default_factory=list)  # lines on each replica and its verify width


def look_at(url: str) -> Look:
    """Query a server. Raise SystemExit with advice if there is nothing to report."""
    url = full_url(url)
    try:
        replicas = ask(url).replicas
        with understanding(url):
            return _look(replicas)
    except NoReport as error:
        raise SystemExit(str(error)) from None


def _look(replicas: Mapping[str, Mapping[str, Any]]) -> Look:
    ours = together(replicas)
    numbers = ours["acceptance"]
    return Look(
        at=time.monotonic(),
        counts=Counts.of(ours),
        accept_length=numbers["accept_length"],
        position_rates=numbers["position_rates"],
        alarms=ours["alarms"],
        details=_lines(replicas) if len(replicas) > 1 else _width_lines(ours),
    )


def _lines(replicas: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for name, ours in replicas.items():
        numbers = ours["acceptance"]
        lines.append(
            f"  {name}: accept length {numbers['accept_length']:.2f} over "
            f"{numbers['verify_steps']} verify steps, alarms {ours['alarms']}"
        )
        lines += [f"    {line}" for line in _width_lines(ours)]
    return lines


def _width_lines(ours: Mapping[str, Any]) -> list[str]:
    """Describe the verify width of a replica; empty if its server does not report one."""
    width = ours.get("width")
    if width is None:
        return []
    mode = "auto" if width["mode"] == "auto" else f"fixed at {width['mode']}"
    passes = width.get("passes", 1)
    repeated = f" in each of {passes} passes a step" if passes > 1 else ""
    lines = [
        f"verify width {mode}: {width['width']}{repeated} now, "
        f"{width['expected_tokens']:.2f} tokens expected per step"
    ]
    if width["fixed_because"] is not None:
        lines.append(f"  fixed because: {width['fixed_because']}")
    counts = width["steps_by_width"]
    if counts:
        steps = sum(counts.values())
        shares = " ".join(f"{rows}:{count / steps:.0%}" for rows, count in counts.items())
        lines.append(f"  {steps} batch steps by width: {shares}")
    shared = width.get("shared")
    if shared and shared["steps"]:
        lines.append(
            f"  {shared['steps']} batch steps of shared rows: lately {shared['mean_width']:.1f} "
            f"per request, {shared['expected_tokens']:.2f} tokens expected and "
            f"{shared['tokens']:.2f} committed"
        )
    wrapped = (textwrap.wrap(line, LINE_LENGTH - 8) for line in _costs(width["costs"]))
    return [*lines, *(f"  {line}" for line in itertools.chain(*wrapped))]


def _costs(costs: Mapping[str, Any]) -> list[str]:
    if "corrections" not in costs:
        if not costs["is_ready"]:
            return ["costs: not learnt yet"]
        learnt = {name: value for name, value in costs.items() if name != "is_ready"}
        return [f"costs: {', '.join(f'{name} {value:g}' for name, value in learnt.items())}"]
    tables = {
        "verify pass, ms by rows": costs.get("verify_ms"),
        "draft pass, ms by requests": costs.get("draft_ms"),
        "draft head, ms by drafts": costs.get("head_ms"),
        "corrected while serving, by rows": costs["corrections"],
        "corrected without drafts, by rows": costs.get("corrections_without_drafts"),
        **{
            f"paced by the host, {HOST_KINDS[kind]}, ms by requests": table
            for kind, table in costs.get("host_ms", {}).items()
        },
    }
    lines = [
        f"{name}: {', '.join(f'{size}: {value:g}' for size, value in table.items())}"
        for name, table in tables.items()
        if table
    ]
    return [*lines, f"context, ms per token: {costs['ms_per_context_token']:g}"]


def chart(looks: list[Look]) -> str:
    """Return the chart of the latest snapshot, with the rate since the previous one."""
    last = looks[-1]
    histogram = last.counts.histogram
    steps = sum(histogram)
    lines = [
        f"accept length {last.accept_length:.2f} over {steps} verify steps, "
        f"{rates(looks)[-1]:.1f} tokens/s, alarms {last.alarms}",
        *last.details,
        "",
        "tokens committed per step          drafts accepted by position",
    ]
    most = max(histogram) or 1
    # position k stands beside commits of k + 1 tokens: k drafts and the bonus
    positions = [None, *last.position_rates]
    for tokens, (count, rate) in enumerate(zip(histogram, positions, strict=True), start=1):
        left = f"{tokens:3d} {'#' * round(20 * count / most):20s} {count / max(steps, 1):6.1%}"
        right = ""
        if rate is not None:
            right = f"{tokens - 1:3d} {'#' * round(20 * rate):20s} {rate:6.1%}"
        lines.append(f"{left}    {right}".rstrip())
    return "\n".join(lines)


def rates(looks: list[Look]) -> list[float]:
    """Return tokens per second between snapshots, or since a restart in between; 0 for the
    first."""
    found = [0.0]
    for before, after in zip(looks, looks[1:], strict=False):
        seconds = max(after.at - before.at, 1e-9)
        found.append(after.counts.since(before.counts).committed / seconds)
    return found


def draw(looks: list[Look], path: Path, url: str) -> None:
    """Plot the histogram, acceptance by position, and tokens per second over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    last = looks[-1]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4))
    steps = sum(last.counts.histogram)
    shares = [count / max(steps, 1) for count in last.counts.histogram]
    axes[0].bar(range(1, len(shares) + 1), shares, color=ACCEPT_COLOUR)
    axes[0].set(title=f"accept length {last.accept_length:.2f}", xlabel="tokens committed per step")
    axes[0].set(ylabel="share of verify steps", ylim=(0, 1))
    axes[1].bar(range(1, len(last.position_rates) + 1), last.position_rates, color=ACCEPT_COLOUR)
    axes[1].set(title="drafts accepted, by position", xlabel="position in the block")
    axes[1].set(ylabel="share of verify steps", ylim=(0, 1))
    # the first rate is not known
    times, speeds = [look.at - looks[0].at for look in looks], rates(looks)
    axes[2].plot(times[1:], speeds[1:], color=COLOUR, marker="." if len(looks) < 4 else "")
    axes[2].set(title="speed while watching", xlabel="seconds", ylabel="tokens per second")
    # an idle server has a line at zero, not in the middle
    axes[2].set_ylim(0, 1.1 * max(*speeds, 1.0))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    at = time.strftime("%Y-%m-%d %H:%M")
    figure.suptitle(f"{url}, {at}, {steps} verify steps since its start", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def check_picture(path: Path) -> None:
    """Raise SystemExit if no picture can be drawn there: the report may run for hours before."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise SystemExit(
            f"--png {path} needs matplotlib, which {sys.executable} does not have. Install "
            "matplotlib, or omit --png."
        ) from None
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise SystemExit(
            f"--png {path} ends with {path.suffix or 'no suffix'}, but pictures are drawn as "
            f"{', '.join(kinds)}. Pass a path that ends with one of these, such as report.png."
        )
    try:
        check_writable(path, option="--png")
    except ValueError as error:
        raise SystemExit(str(error)) from None


def run_report(options: argparse.Namespace) -> int:
    if len(options.url) > 1:
        raise SystemExit(
            f"The report in the terminal shows one server, but --url names {len(options.url)}. "
            "Pass one of them, or --web to watch all."
        )
    if options.host is not None or options.port is not None:
        raise SystemExit("--host and --port are for the live page. Add --web, or omit them.")
    if options.png is not None:
        check_picture(options.png)
    looks: list[Look] = []
    is_done = True
    clear = "\033[H\033[2J" if sys.stdout.isatty() else ""
    try:
        while not options.looks or len(looks) < options.looks:
            if looks:
                time.sleep(options.interval)
            looks.append(look_at(options.url[0]))
            print(f"{clear}{chart(looks)}\n", flush=True)
    finally:
        # Ctrl-C is a usual end
        if options.png is not None and looks:
            is_done = save(looks, options.png, full_url(options.url[0]))
    return 0 if is_done else 1


def save(looks: list[Look], path: Path, url: str) -> bool:
    """Draw the picture and say so, or why it is lost. No error: one would take the place of
    Ctrl-C, or of what the server's end was told with."""
    try:
        draw(looks, path, url)
    except OSError as error:
        print(f"--png {path} was not written: {error.strerror or error}", file=sys.stderr)
        return False
    print(f"drawn: {path}")
    return True
