"""The table of benchmarks/recipes.py."""

from __future__ import annotations

from typing import Any

from benchmarks.result_files import AGREEMENT, is_unsteady
from benchmarks.systems import SYSTEMS, backends_text, kind_of

MEMORY = {
    "target_weights": "target",
    "draft_weights": "drafter",
    "target_kv": "target KV",
    "draft_kv": "draft KV",
    "graphs": "graphs",
}
LEGEND = (
    "Decode tokens/s by concurrent requests; for DFLASH at accept lengths {lengths}. ~ marks a "
    "rate derived from the step time measured at another length, ? one whose two best tries are "
    f"more than {AGREEMENT:.0%} apart, ! a batch that did not fit and was served in parts. "
    "Attention is the backend in use; plain and in-tree were left to SGLang's choice unless "
    "their name or the command says otherwise. Memory in GB as SGLang reports it. A start time in "
    "brackets was measured beside other servers. A ratio with * compares servers of different runs."
)

# a server's measurement, as recipes.py stores it
Cell = dict[str, Any]


def rate_at(cells: list[Cell], length: int, requests: int) -> tuple[float, bool] | None:
    """Return a rate and whether it was measured, from one system's cells at any lengths."""
    by_length = {cell["length"]: step_ms(cell, requests) for cell in cells}
    measured = by_length.get(length)
    if measured is not None:
        return 1000 * requests * length / measured, True
    for other in sorted(by_length, reverse=True):
        step = by_length[other]
        if step is not None:
            return 1000 * requests * length / step, False
    return None


def step_ms(cell: Cell, requests: int) -> float | None:
    return next((p["step_ms"] for p in cell.get("points", ()) if p["requests"] == requests), None)


def rate_cell(cells: list[Cell], lengths: list[int], requests: int) -> str:
    if kind_of(cells[0]["system"]) == "plain":
        step = step_ms(cells[0], requests)
        return "" if step is None else f"{1000 * requests / step:.0f}{marks(cells, requests)}"
    found = [rate_at(cells, length, requests) for length in lengths]
    shown = " / ".join("" if f is None else f"{f[0]:.0f}{'' if f[1] else '~'}" for f in found)
    return shown + marks(cells, requests)


def marks(cells: list[Cell], requests: int) -> str:
    points = [p for cell in cells for p in cell.get("points", ()) if p["requests"] == requests]
    unsteady = "?" if any(map(is_unsteady, points)) else ""
    return unsteady + ("!" if any(p.get("together", requests) < requests for p in points) else "")


def quotient(cells: list[Cell], others: list[Cell], requests: int) -> str:
    """Return the speed-up of `cells` over `others`, at the greatest length both have."""
    shared = {c["length"]: c for c in cells if step_ms(c, requests)}
    against = {c["length"]: c for c in others if step_ms(c, requests)}
    lengths = sorted(shared.keys() & against.keys())
    if not lengths:
        return ""
    one, other = shared[lengths[-1]], against[lengths[-1]]
    ratio = (step_ms(other, requests) or 0.0) / (step_ms(one, requests) or 1.0)
    return f"{ratio:.2f}x{'' if one['call'] == other['call'] else '*'}"


def memory_cell(cell: Cell, part: str) -> str:
    value = cell["memory_gb"].get(part)
    return "" if value is None else f"{value:.1f}"


def report(cells: list[Cell], *, shown_lengths: list[int]) -> str:
    """Return the table, the errors of derived rates, and the failures, as Markdown."""
    good = [cell for cell in cells if "error" not in cell]
    requests = sorted({p["requests"] for cell in good for p in cell["points"]})
    rows: dict[tuple[str, str], dict[str, list[Cell]]] = {}
    for cell in good:
        systems = rows.setdefault((cell["recipe"], cell["variant"]), {})
        systems.setdefault(cell["system"], []).append(cell)
    heads = [
        "recipe",
        "variant",
        "system",
        "attention",
        "start, s",
        "answers OpenAI",
        *MEMORY.values(),
    ]
    heads += ["KV tokens", *(f"tok/s at {n}" for n in requests)]
    heads += [f"ours / in-tree at {n}" for n in requests]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for (recipe, variant), systems in rows.items():
        for system in sorted(systems, key=lambda name: (SYSTEMS.index(kind_of(name)), name)):
            found = systems[system]
            first = max(found, key=lambda cell: cell["length"])
            started = f"{first['start_s']:.0f}"
            row = [recipe, variant, system, backends_text(first.get("attention"))]
            row += [f"({started})" if first.get("beside") else started]
            row += ["yes" if first["openai"]["completion_tokens"] else "no"]
            row += [memory_cell(first, part) for part in MEMORY]
            row += [str(first["memory_gb"]["kv_tokens"])]
            row += [rate_cell(found, shown_lengths, n) for n in requests]
            others = systems.get("in-tree", []) if system == "ours" else []
            row += [quotient(found, others, n) for n in requests]
            lines.append("| " + " | ".join(row) + " |")
    legend = LEGEND.format(lengths=" / ".join(map(str, shown_lengths)))
    parts = [legend, "\n".join(lines), checks(rows, requests), failures(cells)]
    return "\n\n".join(part for part in parts if part)


def checks(rows: dict[tuple[str, str], dict[str, list[Cell]]], requests: list[int]) -> str:
    """Compare each rate measured at a second length with the derived one."""
    lines = []
    for (recipe, variant), systems in rows.items():
        for system, found in systems.items():
            if len(found) < 2:
                continue
            base = max(found, key=lambda cell: cell["length"])
            for cell in found:
                if cell is base:
                    continue
                for n in requests:
                    measured = rate_at([cell], cell["length"], n)
                    derived = rate_at([base], cell["length"], n)
                    if measured is None or derived is None:
                        continue
                    off = derived[0] / measured[0] - 1
                    lines.append(
                        f"{recipe}, {variant}, {system}, accept length {cell['length']}, "
                        f"{n} requests: measured {measured[0]:.0f}, derived {derived[0]:.0f} "
                        f"tok/s ({off:+.1%})"
                    )
    return "\n".join(f"- {line}" for line in lines)


def reason_of(error: str) -> str:
    """Return the last line with "Error" of an error and its server's log, else the last line."""
    said = [line.strip() for line in error.splitlines() if "Error" in line]
    return (said[-1] if said else error.strip().splitlines()[-1])[:300]


def failures(cells: list[Cell]) -> str:
    """Return each server that failed, with the reason."""
    lines = []
    for cell in cells:
        if "error" in cell:
            name = ", ".join([cell["recipe"], cell["variant"], cell["system"]])
            name += f" at accept length {cell['length']}" if cell["length"] else ""
            lines.append(f"- {name}: did not run: {cell['error']}")
    return "\n".join(lines)
