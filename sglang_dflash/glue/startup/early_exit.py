"""Fail fast: a start that cannot succeed ends before anything is loaded, with one sentence.

Python programs resolve SGLang's arguments, too: there a refusal is a ValueError to catch. From a
command line it ends the process, without a traceback because the refusal is deliberate.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from sglang_dflash.checkpoint import check_checkpoint


class Refusal(ValueError):
    """A refused start; the text says what was asked for, what was found and what to do."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn a ValueError raised inside into a Refusal."""
    try:
        yield
    except ValueError as error:
        raise Refusal(str(error)) from error


def check_paths_first(original: Any, server_args: Any) -> None:
    """Wrap SGLang's first use of the paths: it would take a missing folder for a model name."""
    if server_args.speculative_algorithm == "DFLASH":
        with refusing():
            check_checkpoint(server_args.model_path, role="target")
            if server_args.speculative_draft_model_path is not None:
                check_checkpoint(server_args.speculative_draft_model_path, role="drafter")
    original(server_args)


# arguments that were parsed from a command line, and are not resolved yet
_parsed: list[Any] = []


def prepare_or_end(original: Any, argv: list[str]) -> Any:
    """Wrap SGLang's parsing of a server's command line; exit if we refuse."""
    try:
        server_args = original(argv)
        _parsed.append(server_args)
        if server_args.speculative_algorithm == "DFLASH":
            check_port(server_args.host, server_args.port)
    except Refusal as refusal:
        raise SystemExit(str(refusal)) from None
    return server_args


def resolve_or_end(original: Any, server_args: Any) -> None:
    """Wrap the resolution of arguments, where it follows the parsing; exit if we refuse a command
    line."""
    try:
        original(server_args)
    except Refusal as refusal:
        if not any(server_args is parsed for parsed in _parsed):
            raise
        raise SystemExit(str(refusal)) from None


def check_port(host: str, port: int) -> None:
    """Raise Refusal unless the port can be bound now: SGLang would only find out at the end."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # as the server does: the port is free as soon as nothing listens on it
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise Refusal(
            f"Cannot listen on --host {host} --port {port}: {error.strerror}. Stop the process "
            "that listens there, or pass another --port."
        ) from error
