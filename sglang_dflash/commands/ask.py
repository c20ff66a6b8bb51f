"""Ask a running server for the DFLASH state of its replicas, or learn why it has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

from sglang_dflash.metrics import replicas_of

# a host that is not there is given up early; a busy scheduler may take its time to answer
CONNECT_S, ANSWER_S = 3.0, 10.0


class NoReport(Exception):
    """There is nothing to report: the message says why, and what to do."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        # "unreachable", "not sglang", "no dflash" or "not understood"
        self.state = state


@dataclass(frozen=True)
class Answer:
    """What a server reports."""

    info: dict[str, Any]  # all of /server_info
    replicas: dict[str, dict[str, Any]]  # DFLASH state by name


def full_url(url: str) -> str:
    """Return the URL with its scheme. Raise SystemExit if it cannot be a server's."""
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        split = urlsplit(full)
        has_host = bool(split.hostname)
        _ = split.port  # raises if it is no number
    except ValueError:
        has_host = False
    if not has_host or split.scheme not in ("http", "https"):
        raise SystemExit(f"--url {url} is not the URL of a server. Pass http://HOST:PORT.")
    return full


@contextlib.contextmanager
def understanding(url: str) -> Iterator[None]:
    """Raise NoReport if what a server reports cannot be read: it is of another version."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise NoReport(
            "not understood",
            f"The DFLASH state that the server at {url} reports is not understood ({reason}). Use "
            "the same version of sglang-dflash here and there.",
        ) from error


def ask(url: str) -> Answer:
    """Query a server. Raise NoReport if there is nothing to report."""
    try:
        response = requests.get(f"{url}/server_info", timeout=(CONNECT_S, ANSWER_S))
        response.raise_for_status()
        info = response.json()
        if not all(isinstance(state, dict) for state in info["internal_states"]):
            raise TypeError("a state that is no object")
    except (requests.HTTPError, requests.JSONDecodeError, KeyError, TypeError) as error:
        is_refused = isinstance(error, requests.HTTPError)
        found = error if is_refused else "its /server_info has another format"
        raise NoReport(
            "not sglang", f"{url} is not an SGLang server ({found}). Pass the --url of one."
        ) from None
    except requests.RequestException:
        raise NoReport(
            "unreachable", f"No SGLang server answers at {url}. Start one, or pass its --url."
        ) from None
    with understanding(url):
        replicas = replicas_of(info)
        for replica in replicas.values():
            _complete(replica["acceptance"])
    if not replicas:
        raise NoReport(
            "no dflash",
            f"The server at {url} runs without our DFLASH. Start it with --speculative-algorithm "
            "DFLASH, sglang-dflash installed and SGLANG_DFLASH unset.",
        )
    return Answer(info, replicas)


def _complete(acceptance: dict[str, Any]) -> None:
    """Add what a server of an earlier version does not count: it verified full blocks, and expected
    nothing."""
    others = [0] * (len(acceptance["histogram"]) - 1)
    acceptance.setdefault("at_width", [*others, acceptance["verify_steps"]])
    acceptance.setdefault("expected_tokens", 0.0)
