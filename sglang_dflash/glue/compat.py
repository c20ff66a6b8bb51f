"""SGLang's symbols under our names, and the check of the installed release against them.

Each symbol is imported on first use, so that the plug-in stays cheap to load. `broken()`
lists everything that the installed release has moved, renamed or given another signature.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from sglang_dflash.glue import release, symbols
from sglang_dflash.glue.contract import Symbol

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
    return [f"{name}: {moved}" for name, moved in what_moved().items() if moved is not None]


def what_moved() -> dict[str, str | None]:
    """Return what the installed SGLang has changed of each symbol; None if nothing."""
    return {name: _what_moved(symbol) for name, symbol in SYMBOLS.items()}


def _what_moved(symbol: Symbol) -> str | None:
    try:
        lost = symbol.lost()
    except (ImportError, AttributeError) as error:
        return f"{symbol.dotted} is gone ({error})"
    return f"{symbol.dotted} lost {', '.join(lost)}" if lost else None
