"""SGLang's symbols under our names, and the check of the installed release against them.

Each symbol is imported on first use, so that the plug-in stays cheap to load. `broken()`
lists everything that the installed release has moved, renamed or given another signature.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from sglang_dflash.glue import release, symbols

# of the installed release; of the newest that we serve if the installed one is another
SYMBOLS = symbols.of(release.judged_as())


def __getattr__(name: str) -> Any:
    if name not in SYMBOLS:
        raise AttributeError(f"compat has no SGLang symbol {name!r}")
    value = globals()[name] = SYMBOLS[name].resolve()
    return value


def registered_plugins() -> list[str]:
    """Return the plug-in entry points that SGLang will load."""
    return [entry.value for entry in metadata.entry_points(group="sglang.srt.plugins")]


def broken() -> list[str]:
    """Return one line for each symbol that the installed SGLang no longer offers as we use it."""
    lines = []
    for name, symbol in SYMBOLS.items():
        try:
            lost = symbol.lost()
        except (ImportError, AttributeError) as error:
            lines.append(f"{name}: {symbol.dotted} is gone ({error})")
            continue
        if lost:
            lines.append(f"{name}: {symbol.dotted} lost {', '.join(lost)}")
    return lines
