"""How pictures show the systems: one colour and one name for each, everywhere."""

from __future__ import annotations

from benchmarks.systems import kind_of

# a test keeps ours equal to the colour in sglang_dflash/commands/report.py, which is not imported:
# serving.py measures other releases of SGLang too, where little of the package can be imported
COLOURS = {"ours": "#1b7f4d", "in-tree": "#d9772b", "plain": "#7a7a7a"}
NAMES = {"ours": "sglang_dflash", "in-tree": "SGLang's DFLASH", "plain": "plain decoding"}
# of the variants of one system, in the order in which they appear
LINES = ("-", "--", ":", "-.")


def name_of(system: str) -> str:
    """Return e.g. "sglang_dflash" or "SGLang's DFLASH, fa4"."""
    kind = kind_of(system)
    variant = system.removeprefix(kind).removeprefix("-")
    return NAMES[kind] + (f", {variant}" if variant else "")


def style_of(system: str, drawn: list[str]) -> dict[str, str]:
    """Return the colour and the line of a system in a picture of all that are `drawn`."""
    kind = kind_of(system)
    variants = [name for name in drawn if kind_of(name) == kind]
    line = LINES[variants.index(system) % len(LINES)]
    return {"color": COLOURS[kind], "linestyle": line, "label": name_of(system)}
