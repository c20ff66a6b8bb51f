"""The reports of benchmarks/tasks.py: equality, scores, tables and a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks import result_files, systems

TITLES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "mtbench": "MT-Bench",
}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Answer:
    """One turn's answer and its verify steps."""

    question: str
    turn: int
    text: str
    token_ids: tuple[int, ...]
    verify_steps: int
    histogram: tuple[int, ...]  # [k]: steps that accepted k drafts
    is_cut: bool
    # seconds on a clock of the client
    began: float = 0.0
    ended: float = 0.0


def compare(plain: Iterable[Answer], others: Iterable[Answer]) -> dict[str, Any]:
    """Compare answers to the same chats; report where differing ones diverge from plain."""
    expected = {(answer.question, answer.turn): answer.token_ids for answer in plain}
    found = {(answer.question, answer.turn): answer.token_ids for answer in others}
    equal, skipped, parted = 0, 0, []
    differing: set[str] = set()
    for (question, turn), ids in sorted(found.items()):
        wanted = expected.get((question, turn))
        if wanted is None:
            continue
        if question in differing:
            skipped += 1
        elif ids == wanted:
            equal += 1
        else:
            differing.add(question)
            parted.append(first_difference(ids, wanted))
    return {
        "equal": equal,
        "of": equal + len(parted),
        "not_compared_after_a_difference": skipped,
        "median_first_difference": median(parted) if parted else None,
    }


def first_difference(ids: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Return the position of the first token that differs; the shorter length if none does."""
    pairs = enumerate(zip(ids, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(wanted)))


def is_right(task: str, text: str, reference: str | None) -> bool | None:
    """Grade an answer; None if its text alone cannot be graded. Code is not run."""
    if reference is None or task not in ("gsm8k", "math500"):
        return None
    if task == "gsm8k":
        wanted = last_number(reference)
        return wanted is not None and last_number(last_boxed(text) or text) == wanted
    wanted_text, found = last_boxed(reference), last_boxed(text)
    return (
        wanted_text is not None and found is not None and plain_tex(found) == plain_tex(wanted_text)
    )


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, including nested braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    begin = start + len("\\boxed{")
    for position in range(begin, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            if depth == 0:
                return text[begin:position]
            depth -= 1
    return None


def plain_tex(text: str) -> str:
    """Strip formatting that does not change a formula's value."""
    for noise in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "$", "^{\\circ}", "^\\circ"):
        text = text.replace(noise, "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\(?:text|mathrm)\{([^}]*)\}", r"\1", text)
    return re.sub(r"\s+", "", text).rstrip(".")


Points = dict[tuple[str, int], dict[str, dict[str, Any]]]


def points_at(results: dict[str, Any], temperature: float) -> Points:
    """Return {(task, requests): {system: point}} in the order they were measured."""
    found: Points = {}
    for system, result in results.items():
        for point in result["points"]:
            if point["temperature"] == temperature:
                found.setdefault((point["task"], point["requests"]), {})[system] = point
    return found


def grid(
    title: str, points: Points, names: list[str], cell: Callable[[str, dict[str, Any]], str]
) -> str:
    """Return a table: a row per task, a column per concurrency and system; "" if all are empty.

    `cell` gets a system and all systems' points at one task and concurrency."""
    tasks = list(dict.fromkeys(task for task, _ in points))
    columns = [(n, name) for n in sorted({n for _, n in points}) for name in names]
    rows = {
        task: {
            (n, name): cell(name, points[task, n])
            for n, name in columns
            if name in points.get((task, n), {})
        }
        for task in tasks
    }
    columns = [column for column in columns if any(row.get(column) for row in rows.values())]
    if not columns:
        return ""
    lines = [f"{title}\n", "| task | " + " | ".join(f"{name}, {n}" for n, name in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for task, row in rows.items():
        if not any(row.values()):
            continue
        cells = " | ".join(row.get(column, "") for column in columns)
        lines.append(f"| {TITLES.get(task, task)} | {cells} |")
    return "\n".join(lines)


def speed(system: str, here: dict[str, dict[str, Any]]) -> str:
    rate = here[system]["tokens_per_s"]
    shown = f"{rate:.1f}{'?' if result_files.is_unsteady(here[system]) else ''}"
    if system == "plain" or "plain" not in here or not here["plain"]["tokens_per_s"]:
        return shown
    return f"{shown} ({rate / here['plain']['tokens_per_s']:.2f}x)"


def mean_ratios(points: Points, names: list[str], base: str) -> str:
    """Return the geometric means over the tasks of each later system's speed over that of `base`,
    by concurrency; "" if no point has both."""
    found = []
    for system in names[names.index(base) + 1 :] if base in names else ():
        ratios: dict[int, list[float]] = {}
        for (_, requests), here in points.items():
            rates = [here[name]["tokens_per_s"] for name in (system, base) if name in here]
            if len(rates) == 2 and all(rates):
                ratios.setdefault(requests, []).append(rates[0] / rates[1])
        if ratios:
            means = (f"{geometric_mean(each):.2f}x" for _, each in sorted(ratios.items()))
            at = " / ".join(map(str, sorted(ratios)))
            found.append(f"{system} {' / '.join(means)} at {at} requests")
    return f"Geometric mean over the tasks, over {base}: {'; '.join(found)}." if found else ""


def accept_length(system: str, here: dict[str, dict[str, Any]]) -> str:
    found = here[system].get("accept_length")
    return "" if found is None else f"{found:.2f}"


def equality(system: str, here: dict[str, dict[str, Any]]) -> str:
    found = here[system].get("equal_to_plain")
    if found is None:
        return ""
    text = f"{found['equal']} of {found['of']}"
    if found["median_first_difference"] is not None:
        text += f" (diverge at token {found['median_first_difference']:.0f})"
    return text


def count(system: str, here: dict[str, dict[str, Any]]) -> str:
    point = here[system]
    failed = f", {len(point['failed'])} failed" if point["failed"] else ""
    cut = f", {point['cut_at_max_tokens']} cut" if point["cut_at_max_tokens"] else ""
    return f"{point['answered']} of {point['questions']}{cut}{failed}"


def tables(results: dict[str, Any]) -> str:
    """Return all tables as Markdown: speed first, then acceptance, equality, scores and counts."""
    names = list(results)
    measured = [point for result in results.values() for point in result["points"]]
    found = [f"{name} failed: {r['error']}" for name, r in results.items() if "error" in r]
    found.append(systems.backends_line(results))
    unsteady = sum(map(result_files.is_unsteady, measured))
    if unsteady:
        apart = f"more than {result_files.AGREEMENT:.0%} apart"
        found.append(f"? marks a rate whose rounds are {apart}: {unsteady} of {len(measured)}.")
    for temperature in dict.fromkeys(point["temperature"] for point in measured):
        points = points_at(results, temperature)
        at = f"temperature {temperature:g}"
        found += [
            grid(f"Tokens/s and speed-up over plain decoding, {at}", points, names, speed),
            *(mean_ratios(points, names, base) for base in ("plain", "in-tree")),
            grid(f"Accept length, {at}", points, names, accept_length),
            grid(
                "Answers equal to plain decoding's, token by token (plain: to plain's at the "
                f"lowest concurrency), and the median position at which the others diverge, {at}",
                points,
                names,
                equality,
            ),
            grid(f"Correct, {at}", points, names, lambda s, here: here[s]["right"] or ""),
            grid(f"Questions answered, answers cut at --max-tokens, {at}", points, names, count),
        ]
    return "\n\n".join(part for part in found if part)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the speed-up over plain decoding by requests: a panel per task and temperature."""
    panels: dict[str, dict[str, result_files.Line]] = {}
    for system, result in found["results"].items():
        for point in result["points"]:
            title = f"{TITLES.get(point['task'], point['task'])}, temperature "
            lines = panels.setdefault(f"{title}{point['temperature']:g}", {})
            lines.setdefault(system, []).append((point["requests"], point["tokens_per_s"]))
    result_files.draw_rates(panels, found, path)
