"""Refuse a file that cannot be written, before the work whose result it is for. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(path: Path, *, option: str) -> None:
    """Raise ValueError if no file can be written at this path."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder. Pass the path of a file.")
    if not path.parent.is_dir():
        raise ValueError(
            f"{option} {path} cannot be written: there is no folder {path.parent}. Make it, or "
            "pass a file in another one."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(
            f"{option} {path} cannot be written: you have no permission. Pass another file."
        )
