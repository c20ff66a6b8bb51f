"""The servers that benchmarks/load.py starts, and the points that it measures on each."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import load_windows, systems

AUTOMATIC = ("ours", "ours-uniform")
FIXED_MOST = 128  # requests: graphs of whole blocks take the memory of 16 rows each

Place = tuple[str | None, int]  # a profile, or None, and a number of requests


class Start(NamedTuple):
    """One server to start. `length` is the accept length that SGLang's DFLASH simulates."""

    system: str
    profiles: tuple[str | None, ...]
    length: float = 0.0

    @property
    def is_fixed(self) -> bool:
        """Whether each step verifies the same number of rows per request."""
        return self.system not in ("plain", *AUTOMATIC)

    def points(self, sizes: list[int]) -> list[Place]:
        """Return the profiles and numbers of requests to measure."""
        return [
            (profile, n)
            for profile in self.profiles
            for n in sorted(sizes)
            # a mixture needs a request of each kind
            if n >= len((profile or "").split("+")) and not (self.is_fixed and n > FIXED_MOST)
        ]


def starts_of(options: argparse.Namespace) -> list[Start]:
    """Return the servers to start, plain decoding first: the others are compared with it."""
    names = sorted(dict.fromkeys(options.systems), key=lambda name: name != "plain")
    profiles = tuple(options.profiles)
    plain = profiles if options.prompts else (None,)
    found = [Start(name, plain if name == "plain" else profiles) for name in names]
    return found + [
        Start("in-tree", (f"accept{length:g}",), length) for length in options.in_tree or ()
    ]


def switches(start: Start, *, simulates: bool = True) -> dict[str, str]:
    """Return the environment variables that select a system."""
    found = systems.switches(start.system, start.length)
    if start.length:
        found["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"
    if simulates and start.system.startswith("ours"):
        found["SGLANG_DFLASH_DRAW_ACCEPTANCE"] = "1"
    return found


def server_command(start: Start, running: int, options: argparse.Namespace) -> list[str]:
    command = systems.server_command(start.system, options, systems.BLOCK_SIZE)
    command += [*load_windows.LOG_ARGS, "--max-running-requests", str(running)]
    # the automatic width has graphs by rows, and its own limit
    if torch.cuda.is_available() and start.system not in AUTOMATIC:
        command += ["--cuda-graph-max-bs-decode", str(running)]
    own = shlex.split(options.ours_args) if start.system in AUTOMATIC else []
    return [*command, *options.server_args, *own]


def groups_of(missing: dict[Start, list[Place]]) -> Iterator[dict[Start, Place]]:
    """Yield what to measure together: the same of every system, profile by profile, because the
    automatic width has to learn them. Plain decoding, without one, has its turn with the first."""
    every = [place for places in missing.values() for place in places]
    left = {start: set(places) for start, places in missing.items()}
    for profile, n in dict.fromkeys(sorted(every, key=lambda place: place[0] is None)):
        group = {}
        for start, places in left.items():
            for place in ({(profile, n), (None, n)}) & places:
                places.remove(place)
                group[start] = place
        if group:
            yield group


def check_system(system: str, info: dict[str, Any]) -> None:
    """Refuse to measure another system than the one that was asked for."""
    is_ours = "sglang_dflash" in info["internal_states"][0]
    if is_ours != system.startswith("ours"):
        serving = "sglang_dflash" if is_ours else "SGLang without sglang_dflash"
        raise RuntimeError(
            f"{system} was asked for, but {serving} answers. Check that sglang_dflash is installed "
            "in this Python."
        )
