"""Which release of SGLang is installed, and which one this package is written for."""

from __future__ import annotations

from importlib import metadata


def installed() -> str | None:
    """Return the version of SGLang that is installed, None without one."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def supported() -> str:
    """Return the one release this package is written for, as its metadata pins it."""
    for requirement in metadata.requires("sglang-dflash") or ():
        if requirement.startswith("sglang=="):
            return requirement.removeprefix("sglang==").split(";")[0].strip()
    raise RuntimeError("sglang-dflash's metadata pins no sglang release; reinstall it.")
