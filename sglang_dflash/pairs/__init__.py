"""Models shipped with the package: the tiny pair, and a drafter for SmolLM2."""

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
    """Return the folder of the drafter for the target of `pairs.smollm2`."""
    return _folder("smollm2_dflash")


def _folder(*names: str) -> Path:
    return Path(str(files(__name__).joinpath(*names)))
