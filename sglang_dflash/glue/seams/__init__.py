"""What differs between the served releases of SGLang: one module for each, with the same names.

The installed release chooses, once; no other file asks for a version. A release that does something
itself says so by a name that reads as a claim. What a module uses of SGLang is in the table of its
release in `glue/symbols/`.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from sglang_dflash.glue import release


def of(version: str) -> ModuleType:
    """Return the module of a served release."""
    return importlib.import_module(f"{__name__}.sglang_{version.replace('.', '_')}")


@functools.cache
def _chosen() -> ModuleType:
    return of(release.judged_as())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = globals()[name] = getattr(_chosen(), name)
    return value
