"""The installed release of SGLang, and those that this package serves."""

from __future__ import annotations

from importlib import metadata

# oldest first; each has a module in glue/seams/ and a table in glue/symbols/
SERVED = ("0.5.17", "0.5.23")
NEWEST = SERVED[-1]


def installed() -> str | None:
    """Return the installed version of SGLang, None without one."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def judged_as() -> str:
    """Return the served release that the installed one is, or else is compared with."""
    found = installed()
    return found if found in SERVED else NEWEST


def which_to_install() -> str:
    """Return the versions to choose from, as a user would ask pip for them."""
    return " or ".join(f"sglang=={version}" for version in reversed(SERVED))
