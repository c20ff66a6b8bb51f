"""Draw the README's picture from result files: speed-up over plain decoding by requests.

    python -m benchmarks.front_picture

Left: full blocks, SGLang's DFLASH beside ours. Right: our automatic width under load. Whatever is
written in the picture, such as model, card and commits, comes from the files.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import ROOT, load_report, result_files
from benchmarks.bar_picture import Bars, draw_bars, draw_plain
from benchmarks.captions import model_of, release, simulated_length
from benchmarks.picture_style import COLOURS, HATCHES, NAMES, SPEED_UP, save
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = ROOT / "benchmarks" / "results"
PROFILES = {"accept8": "-", "accept4.2": "--", "accept1": ":"}
Points = dict[tuple[int, int], dict[str, Any]]  # by requests and context


def points_of(found: dict[str, Any], system: str) -> Points:
    points = found["results"][system]["points"]
    return {(p["requests"], p["context"]): p for p in points if p.get("sampling") != "sampled"}


def shortfall(point: dict[str, Any]) -> str:
    """Return e.g. "29 of 32" if not all requests of a batch ran at once, else nothing."""
    together = point.get("together", point["requests"])
    return "" if together == point["requests"] else f"{together} of {point['requests']}"


def bars_of(label: str, kind: str, points: Points, plain: Points, *, hatch: str = "") -> Bars:
    heights = [points[key]["tokens_per_s"] / plain[key]["tokens_per_s"] for key in plain]
    marks = ["*" if shortfall(points[key]) else "" for key in plain]
    texts = [f"{y:.1f}x{mark}" for y, mark in zip(heights, marks, strict=True)]
    return Bars(label, COLOURS[kind], hatch, heights, texts)


def left_bars(serving: dict[str, Any], newest: dict[str, Any], system: str) -> list[Bars]:
    """Return ours and SGLang's DFLASH from one call, and both from a call with a newer release."""
    plain = points_of(serving, "plain")
    here, later = release(serving), release(newest)
    target = newest["results"][system]["attention"]["decode"].upper()
    hatch = HATCHES[1]
    solid = [
        bars_of(f"{NAMES[kind]} ({here})", kind, points_of(serving, kind), plain)
        for kind in ("ours", "in-tree")
    ]
    ours = f"{NAMES['ours']} ({later})"
    theirs = f"{NAMES['in-tree']} ({later}, {target})"
    return [
        *solid,
        bars_of(ours, "ours", points_of(newest, "ours"), plain, hatch=hatch),
        bars_of(theirs, "in-tree", points_of(newest, system), plain, hatch=hatch),
    ]


def point_name(requests: int, context: int) -> str:
    length = f"{context // 1024}K" if context >= 1024 else str(context)
    return f"{requests}\n({length} context)"


def length_of(found: dict[str, Any]) -> str:
    """Return the accept length that a result was measured with, from its command."""
    length = simulated_length(found)
    if length is None:
        raise SystemExit("The bars are of real acceptance: their title would be wrong.")
    return length


def about(
    serving: dict[str, Any], load: dict[str, Any], newest: dict[str, Any], system: str
) -> list[str]:
    """Return the lines of the caption."""
    solid, hatched, right = (str(found["commit"])[:7] for found in (serving, newest, load))
    lines = [
        f"{model_of(load)} on one {load['gpu']}, decode only. Acceptance simulated at "
        f"{length_of(serving)} tokens per step (left), and at the lengths named (right).",
        f"Plain decoding and solid bars: {release(serving)}, commit {solid}. "
        f"Hatched: {release(newest)}, commit {hatched}, a separate call. "
        f"Right: {release(load)}, commit {right}.",
    ]
    plain, measured = points_of(serving, "plain"), ((serving, "ours"), (serving, "in-tree"))
    points = [points_of(*each) for each in (*measured, (newest, "ours"), (newest, system))]
    short = [text for each in points for key in plain if (text := shortfall(each[key]))]
    if short:
        lines.append(f"* in one batch only {', '.join(short)} requests ran at once")
    return lines


def draw(
    serving: dict[str, Any], newest: dict[str, Any], system: str, load: dict[str, Any], path: Path
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.7), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    names = [point_name(*key) for key in points_of(serving, "plain")]
    draw_bars(left, left_bars(serving, newest, system), names)
    # room for the legend
    left.set_ylim(0, 1.1 * left.get_ylim()[1])
    left.set_title(f"Full blocks, accept length {length_of(serving)}", fontsize=10)
    draw_load(right, load)
    right.set_title(f"{NAMES['ours']} with the automatic width, under load", fontsize=10)
    for axis in (left, right):
        draw_plain(axis)
        axis.set_xlabel("concurrent requests")
        axis.set_ylabel(SPEED_UP)
        axis.legend(fontsize=8, frameon=False)
    save(figure, path, "\n".join(about(serving, load, newest, system)))


def draw_load(axis: Axes, load: dict[str, Any]) -> None:
    results = load["results"]
    sizes = sorted({n for _, n in load_report.points_of(results, load_report.AUTO)})
    for profile, line in PROFILES.items():
        ratios = [speed_up(results, profile, n) for n in sizes]
        label = load_report.title_of(profile)
        axis.plot(sizes, ratios, line, marker="o", color=COLOURS["ours"], label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)


def speed_up(results: dict[str, Any], profile: str, requests: int) -> float:
    """Return the speed-up of the automatic width; not a number, and not drawn, if not measured."""
    found = load_report.ratio(results, load_report.AUTO, load_report.PLAIN, (profile, requests))
    return math.nan if found is None else found.value


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--serving",
        type=Path,
        default=RESULTS / "serving-h200.json",
        help="results of benchmarks.serving, for the left half; default: "
        "benchmarks/results/serving-h200.json",
    )
    parser.add_argument(
        "--newest",
        type=Path,
        default=RESULTS / "serving-0.5.23-h200.json",
        help="the same with a newer release of SGLang, hatched; default: "
        "benchmarks/results/serving-0.5.23-h200.json",
    )
    parser.add_argument(
        "--newest-system",
        default="in-tree-fa4",
        help="the fastest system of SGLang's DFLASH in --newest; default: %(default)s",
    )
    parser.add_argument(
        "--load",
        type=Path,
        default=RESULTS / "load-gemma4-31b-h200.json",
        help="results of benchmarks.load, for the right half; default: "
        "benchmarks/results/load-gemma4-31b-h200.json",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "front-h200.png",
        help="picture to write; default: benchmarks/results/front-h200.png",
    )
    options = parser.parse_args()
    serving, newest, load = (
        result_files.read(getattr(options, name), f"--{name}", "results")
        for name in ("serving", "newest", "load")
    )
    if len({found["gpu"] for found in (serving, newest, load)}) != 1:
        raise SystemExit("The files are of different cards: one picture would compare these.")
    draw(serving, newest, options.newest_system, load, options.out)
    print(f"drawn: {options.out}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("front_picture", main))
