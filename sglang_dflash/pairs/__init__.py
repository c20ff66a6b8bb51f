"""Model pairs that travel inside the package, so that a server can be tried without a download."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def tiny_target() -> Path:
    """Return the folder of the embedded target."""
    return _folder("target")


def tiny_drafter() -> Path:
    """Return the folder of the drafter trained for the embedded target."""
    return _folder("drafter")


def _folder(name: str) -> Path:
    return Path(str(files(__name__).joinpath("tiny", name)))
