"""Draw the README's picture from result files: speed-up over plain decoding by requests.

    python -m benchmarks.front_picture

Left: full blocks, SGLang's DFLASH beside ours. Right: our automatic width under load. Whatever is
written in the picture, such as model, card and commits, comes from the files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT, load_report
from benchmarks.picture_style import COLOURS, NAMES
from sglang_dflash.interrupt import end_on_interrupt

RESULTS = ROOT / "benchmarks" / "results"
PROFILES = {"accept8": "-", "accept4.2": "--", "accept1": ":"}
Points = dict[tuple[int, int], dict[str, Any]]  # by requests and context


class Bars(NamedTuple):
    """One system's speed-up over plain decoding at each point."""

    label: str
    colour: str
    hatch: str
    heights: list[float]
    short: list[str]  # points at which not all requests ran at once, and how many did


def points_of(found: dict[str, Any], system: str) -> Points:
    points = found["results"][system]["points"]
    return {(p["requests"], p["context"]): p for p in points if p.get("sampling") != "sampled"}


def bars_of(label: str, kind: str, points: Points, plain: Points, *, hatch: str = "") -> Bars:
    heights = [points[key]["tokens_per_s"] / plain[key]["tokens_per_s"] for key in plain]
    short = []
    for requests, context in plain:
        together = points[requests, context].get("together", requests)
        short.append("" if together == requests else f"{together} of {requests}")
    return Bars(label, COLOURS[kind], hatch, heights, short)


def left_bars(serving: dict[str, Any], newest: dict[str, Any], system: str) -> list[Bars]:
    """Return ours and SGLang's DFLASH from one call, and both from a call with a newer release."""
    plain = points_of(serving, "plain")
    here, later = f"SGLang {serving['sglang']}", f"SGLang {newest['sglang']}"
    target = newest["results"][system]["attention"]["decode"]
    return [
        bars_of(f"{NAMES['ours']} ({here})", "ours", points_of(serving, "ours"), plain),
        bars_of(f"{NAMES['in-tree']} ({here})", "in-tree", points_of(serving, "in-tree"), plain),
        bars_of(
            f"{NAMES['ours']} ({later}, separate call)",
            "ours",
            points_of(newest, "ours"),
            plain,
            hatch="///",
        ),
        bars_of(
            f"{NAMES['in-tree']} ({later}, {target.upper()}, that call)",
            "in-tree",
            points_of(newest, system),
            plain,
            hatch="///",
        ),
    ]


def point_name(requests: int, context: int) -> str:
    length = f"{context // 1024}K" if context >= 1024 else str(context)
    return f"{requests}\n({length} context)"


def simulated_length(found: dict[str, Any]) -> str:
    """Return the accept length that a result was measured with, from its command."""
    asked = re.search(r"--simulate-accept-length (\S+)", found["command"])
    if asked is None:
        raise SystemExit("The bars are of real acceptance: their title would be wrong.")
    return asked[1]


def about(
    serving: dict[str, Any], load: dict[str, Any], newest: dict[str, Any], bars: list[Bars]
) -> str:
    short = [each for one in bars for each in one.short if each]
    note = f"\n* in one batch only {', '.join(short)} requests ran at once" if short else ""
    commits = [str(found["commit"])[:7] for found in (serving, newest, load)]
    return (
        f"{load['model']} shapes with random weights on one {load['gpu']}, decode only. "
        f"Acceptance is simulated. Plain decoding: SGLang {serving['sglang']}. "
        f"Commits {', '.join(commits)}.{note}"
    )


def draw(
    serving: dict[str, Any], newest: dict[str, Any], system: str, load: dict[str, Any], path: Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.4), gridspec_kw={"width_ratios": [3, 2]}
    )
    bars = left_bars(serving, newest, system)
    draw_bars(left, bars, list(points_of(serving, "plain")))
    length = simulated_length(serving)
    left.set_title(f"Full blocks, accept length {length}", fontsize=10)
    left.set_ylabel("speed-up over plain decoding")
    draw_load(right, load)
    right.set_title(f"{NAMES['ours']} with the automatic width, under load", fontsize=10)
    for axis in (left, right):
        axis.axhline(1.0, color=COLOURS["plain"], linewidth=1)
        axis.set_xlabel("concurrent requests")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(
        0.5, 0.01, about(serving, load, newest, bars), ha="center", fontsize=8, color="#444444"
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_bars(axis: Any, systems: list[Bars], keys: list[tuple[int, int]]) -> None:
    width = 0.8 / len(systems)
    for i, bars in enumerate(systems):
        places = [x + (i - (len(systems) - 1) / 2) * width for x in range(len(keys))]
        drawn = axis.bar(
            places,
            bars.heights,
            width=0.94 * width,
            color=bars.colour,
            hatch=bars.hatch,
            edgecolor="white",
            label=bars.label,
        )
        marks = ["*" if short else "" for short in bars.short]
        texts = [f"{y:.1f}x{mark}" for y, mark in zip(bars.heights, marks, strict=True)]
        axis.bar_label(drawn, texts, fontsize=8, padding=2)
    axis.set_xticks(range(len(keys)), [point_name(*key) for key in keys])
    axis.margins(y=0.22)


def draw_load(axis: Any, load: dict[str, Any]) -> None:
    results = load["results"]
    sizes = sorted({n for _, n in load_report.points_of(results, load_report.AUTO)})
    for profile, line in PROFILES.items():
        found = [load_report.ratio(results, load_report.AUTO, "plain", (profile, n)) for n in sizes]
        label = load_report.title_of(profile)
        axis.plot(sizes, found, line, marker="o", color=COLOURS["ours"], label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(n) for n in sizes])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serving", type=Path, default=RESULTS / "serving-h200.json")
    parser.add_argument("--newest", type=Path, default=RESULTS / "serving-0.5.23-h200.json")
    parser.add_argument("--newest-system", default="in-tree-fa4", help="its fastest there")
    parser.add_argument("--load", type=Path, default=RESULTS / "load-gemma4-31b-h200.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "front-h200.png")
    options = parser.parse_args()
    serving, newest, load = (
        json.loads(path.read_text()) for path in (options.serving, options.newest, options.load)
    )
    if len({found["gpu"] for found in (serving, newest, load)}) != 1:
        raise SystemExit("The files are of different cards: one picture would compare these.")
    draw(serving, newest, options.newest_system, load, options.out)
    print(f"drawn: {options.out}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("front_picture", main))
