"""The installed release of SGLang, and the one this package supports."""

from __future__ import annotations

from importlib import metadata


def installed() -> str | None:
    """Return the installed version of SGLang, None without one."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def supported() -> str:
    """Return the one release this package supports, as pinned in its metadata."""
    for requirement in metadata.requires("sglang-dflash") or ():
        if requirement.startswith("sglang=="):
            return requirement.removeprefix("sglang==").split(";")[0].strip()
    raise RuntimeError("sglang-dflash's metadata pins no sglang release; reinstall it.")
