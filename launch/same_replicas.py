"""Exit with a message unless all servers at the given URLs serve the same thing, each in its role.

    python launch/same_replicas.py http://gpu1:30000 http://gpu2:30000
    python launch/same_replicas.py prefill=http://gpu1:30000,8998 decode=http://gpu2:30000

A server is named by its URL, or as prefill=URL[,BOOTSTRAP_PORT] or decode=URL. A router cannot
tell: it would send one request to one release of sglang_dflash, and the next to another. Needs
neither torch nor SGLang, but the router.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.metrics import replicas_of

PATIENCE_S = 30
# SGLang's own
DEFAULT_BOOTSTRAP_PORT = 8998


class Named(NamedTuple):
    """A server as the router's user names it."""

    url: str
    mode: str = "null"  # SGLang's --disaggregation-mode
    bootstrap_port: int | None = None

    @classmethod
    def read(cls, word: str) -> Named:
        role, found, rest = word.partition("=")
        if not found or role not in ("prefill", "decode"):
            return cls(word.rstrip("/"))
        if role == "decode":
            return cls(rest.rstrip("/"), role)
        url, _, port = rest.partition(",")
        if port and not port.isdigit():
            sys.exit(f"{word} names no bootstrap port. Pass prefill=URL,PORT, or prefill=URL.")
        return cls(url.rstrip("/"), role, int(port or DEFAULT_BOOTSTRAP_PORT))

    def misnamed(self, server_info: Mapping[str, Any]) -> str | None:
        """Return what the server does otherwise than it was named; None if nothing."""
        mode, port = server_info.get("disaggregation_mode", "null"), self.bootstrap_port
        if mode != self.mode:
            right = self.url if mode == "null" else f"{mode}={self.url}"
            return f"{self.url} has --disaggregation-mode {mode}. Name it {right}, or restart it."
        found = server_info.get("disaggregation_bootstrap_port")
        if port is not None and port != found:
            return (
                f"{self.url} has --disaggregation-bootstrap-port {found}, not {port}. Name it "
                f"prefill={self.url},{found}."
            )
        return None


def look(server: Named) -> dict[str, Any]:
    """Return what a server runs; exit if it does not tell, or has another role."""
    import requests

    url = server.url

    try:
        response = requests.get(f"{url}/server_info", timeout=PATIENCE_S)
        response.raise_for_status()
        found = response.json()
        what = described(found)
    except (requests.HTTPError, requests.JSONDecodeError, KeyError) as error:
        sys.exit(f"{url} does not say what it runs ({error!r}). Pass the URL of an SGLang server.")
    except requests.RequestException:
        sys.exit(f"No server answers at {url}. Start it before the router, or leave it out.")
    if reason := server.misnamed(found):
        sys.exit(reason)
    return what


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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "servers",
        nargs="+",
        metavar="SERVER",
        help="URL, prefill=URL[,BOOTSTRAP_PORT] or decode=URL",
    )
    words = parser.parse_args().servers
    absent = [name for name in ("requests", "sglang_router") if not importlib.util.find_spec(name)]
    if absent:
        packages = " ".join(name.replace("_", "-") for name in absent)
        sys.exit(
            f"{sys.executable} has no {' and no '.join(absent)}. Install what is missing (pip "
            f"install {packages}), or set PYTHON to one that has it."
        )
    servers = [Named.read(word) for word in words]
    if reason := difference({server.url: look(server) for server in servers}):
        sys.exit(reason)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("same_replicas", main))
