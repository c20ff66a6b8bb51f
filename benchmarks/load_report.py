"""The report of benchmarks/load.py: speed-ups, the figures to reach, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import paired, result_files, systems
from benchmarks.load_points import Text
from benchmarks.paired import Ratio
from benchmarks.result_files import AGREEMENT, is_unsteady
from benchmarks.task_report import TITLES

AUTO, FIXED, PLAIN = "ours", "ours-16", "plain"
LEAST = 0.98  # where nothing may be lost: with a drafter that is always wrong, and on real text
MET, OPEN = "met", "open"
SHORT = {FIXED: "fixed 16"}
INTERVALS = (
    "Systems took turns, round by round. A ratio with an interval is the median over the pairs of "
    f"rounds; with a probability of {paired.CONFIDENCE:.0%} or more the interval holds the true "
    "median. A figure is open where the ratio is below it, but the interval reaches it."
)

Points = dict[tuple[str | None, int], dict[str, Any]]  # by profile (None: plain) and requests


class Figure(NamedTuple):
    """The least ratio of the automatic width's rate to another system's."""

    over: str
    least: float

    def text(self) -> str:
        return f"{self.least:g}" + (" of fixed 16" if self.over == FIXED else "")


def _over_plain(**least: float) -> dict[int, Figure]:
    return {int(name[1:]): Figure(PLAIN, ratio) for name, ratio in least.items()}


FIGURES: dict[str, dict[int, Figure]] = {
    "accept8": {
        **{1: Figure(FIXED, 0.99), 8: Figure(FIXED, 0.99)},
        **_over_plain(n32=3.9, n64=2.45, n128=1.55, n256=1.2),
    },
    "accept4.2": {
        **{1: Figure(FIXED, 0.99), 8: Figure(FIXED, 1.0)},
        **_over_plain(n32=2.6, n64=1.9, n128=1.35, n256=1.1),
    },
    "accept2": _over_plain(n1=1.8, n8=1.65, n32=1.5, n64=1.2, n128=1.03, n256=1.0),
    "accept2+accept8": _over_plain(n32=2.3, n64=1.8, n128=1.4, n256=1.2),
}


def is_text(profile: str) -> bool:
    """Return whether a profile is a file of real questions."""
    return not profile.startswith(("accept", "recorded"))


def figures_for(profile: str, num_requests: int) -> list[Figure]:
    if profile == "accept1":
        return [Figure(PLAIN, LEAST)]
    if is_text(profile):
        return [Figure(PLAIN, LEAST), Figure(FIXED, LEAST)]
    found = FIGURES.get(profile, {}).get(num_requests)
    return [found] if found else []


def title_of(profile: str) -> str:
    """Return e.g. "Accept length 4.2" or "Accept lengths 2 and 8, half of the requests each"."""
    if profile == "recorded":
        return "Profile recorded with the SmolLM2 pair"
    if profile == "accept1":
        return "Drafts always wrong (accept length 1)"
    if is_text(profile):
        text = Text.of(profile)
        name = TITLES.get(text.task, text.task)
        return f"Real text, {name}, temperature {text.temperature:g}"
    lengths = [part.removeprefix("accept") for part in profile.split("+")]
    if len(lengths) == 1:
        return f"Accept length {lengths[0]}"
    return f"Accept lengths {' and '.join(lengths)}, an equal share of the requests each"


def points_of(results: dict[str, Any], system: str) -> Points:
    found = results.get(system, {}).get("points", ())
    return {(point["profile"], point["requests"]): point for point in found}


def plain_point(results: dict[str, Any], key: tuple[str, int]) -> dict[str, Any] | None:
    """Return plain decoding's point: of the same questions, or for all simulated profiles."""
    found = points_of(results, PLAIN)
    return found.get(key if is_text(key[0]) else (None, key[1]))


def both_points(
    results: dict[str, Any], system: str, over: str, key: tuple[str, int]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return two systems' points; None unless both were measured."""
    above = points_of(results, system).get(key)
    below = plain_point(results, key) if over == PLAIN else points_of(results, over).get(key)
    return (above, below) if above and below else None


def ratio(results: dict[str, Any], system: str, over: str, key: tuple[str, int]) -> Ratio | None:
    """Return the ratio of two systems' rates at a point; None unless both were measured."""
    points = both_points(results, system, over, key)
    return paired.ratio_of(*points) if points else None


def verdict(results: dict[str, Any], key: tuple[str, int]) -> str:
    """Return whether a point reaches its figures, or cannot be told to; empty without a figure or a
    measurement."""
    found = [(figure, ratio(results, AUTO, figure.over, key)) for figure in figures_for(*key)]
    known = [(figure.least, value) for figure, value in found if value is not None]
    if not known:
        return ""
    below = [(least, value) for least, value in known if value.value < least]
    told = f" ({', '.join(f'{value.value:.3f}' for _, value in below)})"
    if any(value.is_below(least) for least, value in below):
        return f"**missed**{told}"
    return f"{OPEN}{told}" if below else MET


def marks(point: dict[str, Any]) -> str:
    marked = {" ?": is_unsteady(point), " e": not point["graph"], " s": bool(point.get("short"))}
    return "".join(mark for mark, holds in marked.items() if holds)


def rate_cell(point: dict[str, Any] | None) -> str:
    return f"{point['tokens_per_s']:.1f}{marks(point)}" if point else ""


def ratio_cell(found: Ratio | None) -> str:
    return "" if found is None else found.text()


def widths_text(point: dict[str, Any] | None) -> str:
    """Return the widths of a point's steps, the most frequent first, e.g. "4 (80%), 3 (20%)"; of
    steps whose rows the requests shared, the mean, e.g. "4.2 shared (97%)"."""
    width = (point or {}).get("width")
    if not isinstance(width, dict):
        return ""
    counts = {str(w): n for w, n in (width.get("steps_by_width") or {}).items()}
    shared = width.get("shared")
    if shared and shared["steps"]:
        counts[f"{shared['mean_width']:.1f} shared"] = shared["steps"]
    total = sum(counts.values())
    if not total:
        return ", ".join(f"{name} {value}" for name, value in width.items())
    parts = sorted(counts.items(), key=lambda part: part[1], reverse=True)
    return ", ".join(f"{name} ({n / total:.0%})" for name, n in parts if n / total >= 0.05)


def table(results: dict[str, Any], profile: str) -> str:
    """Return one profile's table: a row per number of requests."""
    measured = {name: points_of(results, name) for name in results}
    others = [name for name in results if name not in (PLAIN, FIXED, AUTO)]
    columns = [FIXED, AUTO, *others]
    rows = sorted({n for name in columns for p, n in measured.get(name, {}) if p == profile})
    titles = ["requests", "plain, tok/s", "fixed 16 / plain", "auto / plain"]
    titles += [f"{name} / plain" for name in others]
    titles += ["auto, tok/s", "auto / fixed 16", "width of auto", "to reach", ""]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for n in rows:
        key, figures = (profile, n), figures_for(profile, n)
        auto = measured.get(AUTO, {}).get(key)
        cells = [str(n), rate_cell(plain_point(results, key))]
        for name in columns:
            here = measured.get(name, {}).get(key)
            found = ratio_cell(ratio(results, name, PLAIN, key))
            cells.append(found + marks(here) if here and found else found)
        cells += [rate_cell(auto), ratio_cell(ratio(results, AUTO, FIXED, key))]
        cells += [
            widths_text(auto),
            ", ".join(figure.text() for figure in figures),
            verdict(results, key),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([f"{title_of(profile)}:", "", *lines])


def texts_together(results: dict[str, Any]) -> str:
    """Return a table of the automatic width over each other system, by requests, over the rounds of
    all texts; empty where too few were measured in turn."""
    profiles = [profile for profile in profiles_of(results) if is_text(profile)]
    others = [name for name in results if name != AUTO]

    def over(name: str, n: int) -> Ratio | None:
        points = (both_points(results, AUTO, name, (profile, n)) for profile in profiles)
        return paired.pooled(filter(None, points))

    rows = []
    for n in sorted({n for _, n in points_of(results, AUTO)}):
        found = [over(name, n) for name in others]
        rows += [[str(n), *map(ratio_cell, found)]] if any(found) else []
    if len(profiles) < 2 or not rows:
        return ""
    titles = ["requests", *(f"auto / {SHORT.get(name, name)}" for name in others)]
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(["All texts together:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def profiles_of(results: dict[str, Any]) -> list[str]:
    keys = [point["profile"] for result in results.values() for point in result.get("points", ())]
    return [profile for profile in dict.fromkeys(keys) if profile is not None]


def between(found: dict[str, Any]) -> str:
    """Return the part of each answer that was timed, as the end of a sentence."""
    if "tokens" not in found:
        return ""
    first, last = found["tokens"]
    return f", from {first} to {last} generated tokens of a request on average"


def report(found: dict[str, Any]) -> str:
    """Return all tables as Markdown, after the count of figures reached."""
    results = found["results"]
    profiles = profiles_of(results)
    auto = points_of(results, AUTO)
    keys = [(profile, n) for profile, n in auto if profile is not None]
    judged = {key: text for key in keys if (text := verdict(results, key))}
    parts = [count_of(judged)] if judged else []
    parts += [table(results, profile) for profile in profiles] or [plain_table(results)]
    parts.append(texts_together(results))
    if any("began" in point for point in auto.values()):
        parts.append(INTERVALS)
    parts.append(
        f"? marks a rate whose windows are more than {AGREEMENT:.0%} apart, e one of steps without "
        "a CUDA graph, s one over fewer tokens, because requests ended or the KV pool holds no "
        f"more. Rates are of decoding only, with all requests running{between(found)}."
    )
    for name, result in results.items():
        parts += [f"{name} failed: {result['error']}"] if "error" in result else []
        skipped = "; ".join(result.get("skipped", ()))
        parts += [f"{name}, not measured: {skipped}"] if skipped else []
    parts.append(systems.backends_line(results))
    calls = [f"- `{c['command']}`" for c in found.get("earlier_calls", ())]
    parts.append("\n".join(["Earlier calls that contributed:", *calls]) if calls else "")
    return "\n\n".join(part for part in parts if part)


def count_of(judged: dict[tuple[str, int], str]) -> str:
    """Return how many figures were reached, and which were not, from the points' verdicts."""
    kinds: dict[str, list[str]] = {"Missed": [], "Open": []}
    for (profile, n), text in judged.items():
        if text != MET:
            kinds["Open" if text.startswith(OPEN) else "Missed"].append(f"{profile} at {n}")
    reached = len(judged) - sum(map(len, kinds.values()))
    named = [f" {kind}: {', '.join(names)}." for kind, names in kinds.items() if names]
    return f"{reached} of {len(judged)} figures reached.{''.join(named)}"


def plain_table(results: dict[str, Any]) -> str:
    lines = ["| requests | plain, tok/s |", "|---|---|"]
    for (_, n), point in sorted(points_of(results, PLAIN).items(), key=lambda item: item[0][1]):
        lines.append(f"| {n} | {rate_cell(point)} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the speed-up over plain decoding by requests: a panel per profile."""
    results = found["results"]
    panels: dict[str, dict[str, result_files.Line]] = {}
    for profile in profiles_of(results):
        sizes = sorted({n for name in results for p, n in points_of(results, name) if p == profile})
        lines = {name: line_of(results, name, profile, sizes) for name in results}
        panels[title_of(profile)] = {name: line for name, line in lines.items() if line}
    result_files.draw_rates(panels, found, path)


def line_of(
    results: dict[str, Any], system: str, profile: str, sizes: list[int]
) -> result_files.Line:
    """Return a system's rates at a profile, by requests: those of the table's ratios, where it has
    one."""
    found: result_files.Line = []
    for n in sizes:
        key = (profile, n)
        plain = plain_point(results, key)
        point = plain if system == PLAIN else points_of(results, system).get(key)
        over_plain = None if system == PLAIN else ratio(results, system, PLAIN, key)
        if plain and over_plain:
            found.append((n, over_plain.value * plain["tokens_per_s"]))
        elif point:
            found.append((n, point["tokens_per_s"]))
    return found
