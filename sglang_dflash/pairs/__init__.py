"""Model pairs that travel with the package: a tiny one whole, and the drafter of a real model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def tiny_target() -> Path:
    """Return the folder of the embedded target."""
    return _folder("tiny", "target")


def tiny_drafter() -> Path:
    """Return the folder of the drafter trained for the embedded target."""
    return _folder("tiny", "drafter")


def smollm2_drafter() -> Path:
    """Return the folder of the drafter trained for the target that `pairs.smollm2` makes."""
    return _folder("smollm2_dflash")


def _folder(*names: str) -> Path:
    return Path(str(files(__name__).joinpath(*names)))
