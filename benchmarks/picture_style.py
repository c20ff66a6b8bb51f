"""How pictures show the systems: one colour and one name for each, everywhere."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.systems import kind_of, named_backend, named_width

# a test keeps ours equal to the colours in sglang_dflash/commands, which is not imported:
# serving.py measures other releases of SGLang too, where little of the package can be imported
COLOURS = {"ours": "#1b7f4d", "in-tree": "#d9772b", "plain": "#7a7a7a"}
NAMES = {"ours": "sglang_dflash", "in-tree": "SGLang's DFLASH", "plain": "plain decoding"}
# of the variants of one system, the first is the system itself
HATCHES = ("", "///", "...", "xxx")
SPEED_UP = "speed-up over plain decoding"
DPI = 100


def name_of(system: str) -> str:
    """Return e.g. "sglang_dflash, width 16" or "SGLang's DFLASH, fa4 attention"."""
    kind = kind_of(system)
    variant = system.removeprefix(kind).removeprefix("-")
    if named_width(system):
        variant = f"width {variant}"
    elif named_backend(system):
        variant = f"{variant} attention"
    return NAMES[kind] + (f", {variant}" if variant else "")


def in_order(systems: Iterable[str]) -> list[str]:
    """Return systems in the order of COLOURS, each before its variants."""
    kinds = list(COLOURS)
    return sorted(systems, key=lambda name: (kinds.index(kind_of(name)), name not in kinds))


def colour_of(system: str) -> str:
    return COLOURS[kind_of(system)]


def hatch_of(system: str, drawn: Iterable[str]) -> str:
    """Return what tells a system from the others of its colour in a picture of all `drawn`."""
    variants = [name for name in in_order(drawn) if kind_of(name) == kind_of(system)]
    return HATCHES[variants.index(system) % len(HATCHES)]


def save(figure: Any, path: Path, caption: str) -> None:
    """Write a figure, with its caption below the panels."""
    # comes with matplotlib, which is not needed to measure
    from PIL import Image

    figure.supxlabel(caption, fontsize=8, color="#444444")
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=DPI)
    # a palette has room for nearly all of its colours, and takes less than half the space
    Image.open(pixels).convert("RGB").quantize(256).save(path, optimize=True)
