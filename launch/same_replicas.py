"""Exit with a message unless all servers at the given URLs serve the same thing.

A router cannot tell: it would send one request to one release of sglang_dflash, and the next to
another. Needs neither torch nor SGLang, but the router.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from sglang_dflash.metrics import replicas_of

PATIENCE_S = 30


def look(url: str) -> dict[str, Any]:
    """Return what the server at a URL runs; exit if it does not tell."""
    import requests

    try:
        response = requests.get(f"{url}/server_info", timeout=PATIENCE_S)
        response.raise_for_status()
        return described(response.json())
    except (requests.HTTPError, requests.JSONDecodeError, KeyError) as error:
        sys.exit(f"{url} does not say what it runs ({error!r}). Pass the URL of an SGLang server.")
    except requests.RequestException:
        sys.exit(f"No server answers at {url}. Start it before the router, or leave it out.")


def described(server_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same in all replicas, by name."""
    ours = next(iter(replicas_of(server_info).values()), None)
    return {
        "sglang_dflash": ours["version"] if ours else "none",
        "SGLang": server_info["version"],
        "target": server_info["model_path"],
        "drafter": ours["drafter"] if ours else "none",
        "block size": ours["block_size"] if ours else "none",
    }


def difference(found: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return one sentence about the first thing in which replicas differ, by URL; None if none."""
    (first, whole), *others = found.items()
    for name, value in whole.items():
        for url, other in others:
            if other[name] != value:
                return (
                    f"The replicas differ in their {name}: {first} has {value}, {url} has "
                    f"{other[name]}. Restart one of them like the other, or leave it out."
                )
    return None


def main(urls: list[str]) -> None:
    absent = [name for name in ("requests", "sglang_router") if not importlib.util.find_spec(name)]
    if absent:
        packages = " ".join(name.replace("_", "-") for name in absent)
        sys.exit(
            f"{sys.executable} has no {' and no '.join(absent)}. Install what is missing (pip "
            f"install {packages}), or set PYTHON to one that has it."
        )
    if reason := difference({url: look(url) for url in urls}):
        sys.exit(reason)


if __name__ == "__main__":
    main(sys.argv[1:])
