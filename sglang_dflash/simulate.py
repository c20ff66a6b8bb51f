"""Simulated acceptance, for benchmarks: how many drafts count as correct, whatever they are.

The output is nonsense, the work of a step is real. Both kinds are deterministic, so ranks need no
communication to agree, and a step's lengths do not depend on its width, only on their cut.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RECORDED = "recorded"
# survival by draft position, recorded with the SmolLM2 pair; it then falls on by the last ratio
RECORDED_SURVIVAL = (0.72, 0.49, 0.33, 0.22, 0.13, 0.09, 0.06, 0.04, 0.03, 0.02)
ACCEPT = re.compile(r"accept(\d+(?:\.\d+)?)")
DECK = 32  # draws of a request over which its mean is kept close to the profile's
DECKS = 1024
KEPT_REQUESTS = 4096  # above it, requests that are not running are forgotten


class SteadyAcceptance:
    """Every request commits the same number of tokens, `accept_length` on average."""

    def __init__(self, accept_length: float) -> None:
        self._accept_length = accept_length
        self._steps = 0

    def num_correct(self, requests: int, width: int, request_ids: Sequence[str]) -> list[int]:
        """Return each request's number of correct drafts in the next step."""
        before = int(self._steps * self._accept_length)
        self._steps += 1
        num_tokens = int(self._steps * self._accept_length) - before
        return [min(max(num_tokens, 1), width) - 1] * requests


class DrawnAcceptance:
    """Each request draws its number of correct drafts in each step from a survival profile.

    The request's id names its profile: `accept4.2-ANYTHING` is geometric, with a mean of 4.2 tokens
    per step at the full block size, and any other id has the recorded profile. Draws come from a
    table of shuffled decks: the DECK draws of a deck spread evenly over the distribution, so that
    short measurements have little noise. A request's id also sets where in the table it starts.
    """

    def __init__(self, block_size: int = 16) -> None:
        self._block_size = block_size
        generator = np.random.default_rng(0)
        strata = np.tile(np.arange(DECK, dtype=np.float64), (DECKS, 1))
        strata = generator.permuted(strata, axis=1)
        self._uniforms = ((strata + generator.random(strata.shape)) / DECK).ravel()
        self._profiles: dict[str, int] = {}
        self._lengths = np.zeros((0, DECK * DECKS), dtype=np.int64)  # a row per profile
        self._rows: dict[str, int] = {}  # request id -> row of the two arrays below
        self._profile_of = np.zeros(0, dtype=np.int64)
        self._next_draw = np.zeros(0, dtype=np.int64)
        self._batch: tuple[list[str], NDArray[np.int64]] = ([], np.zeros(0, dtype=np.int64))

    def num_correct(self, requests: int, width: int, request_ids: Sequence[str]) -> list[int]:
        """Return each request's number of correct drafts in the next step."""
        assert len(request_ids) == requests, f"{len(request_ids)} ids for {requests} requests"
        rows = self._rows_of(request_ids)
        draws = self._next_draw[rows]
        self._next_draw[rows] = (draws + 1) % self._lengths.shape[1]
        lengths = self._lengths[self._profile_of[rows], draws]
        return np.minimum(lengths, width - 1).tolist()

    def _rows_of(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        ids, rows = self._batch
        if ids != request_ids:
            ids = list(request_ids)
            if len(self._rows) + len(ids) > KEPT_REQUESTS:
                self._forget_all_but(ids)
            new = [request_id for request_id in ids if request_id not in self._rows]
            if new:
                self._add(new)
            rows = np.array([self._rows[request_id] for request_id in ids], dtype=np.int64)
            self._batch = ids, rows
        return rows

    def _add(self, new: list[str]) -> None:
        profiles = [self._profile(request_id) for request_id in new]
        starts = [zlib.crc32(request_id.encode()) % DECKS * DECK for request_id in new]
        first = len(self._rows)
        self._rows |= {request_id: first + i for i, request_id in enumerate(new)}
        self._profile_of = np.append(self._profile_of, profiles)
        self._next_draw = np.append(self._next_draw, starts)

    def _forget_all_but(self, running: list[str]) -> None:
        kept = [request_id for request_id in running if request_id in self._rows]
        rows = np.array([self._rows[request_id] for request_id in kept], dtype=np.int64)
        self._rows = {request_id: i for i, request_id in enumerate(kept)}
        self._profile_of, self._next_draw = self._profile_of[rows], self._next_draw[rows]

    def _profile(self, request_id: str) -> int:
        """Return the index of the profile that a request's id names."""
        name = request_id.partition("-")[0]
        if not name.startswith("accept"):
            name = RECORDED
        if name not in self._profiles:
            survival = survival_of(name, self._block_size)
            lengths = (self._uniforms[:, None] < survival).sum(axis=1)
            self._lengths = np.vstack([self._lengths, lengths])
            self._profiles[name] = len(self._profiles)
        return self._profiles[name]


def survival_of(name: str, block_size: int) -> NDArray[np.float64]:
    """Return a profile's probability, for each draft position, that the drafts up to it are
    correct; [block_size - 1]."""
    places = block_size - 1
    if name == RECORDED:
        last, final = RECORDED_SURVIVAL[-2:]
        tail = final * (final / last) ** np.arange(1, places + 1)
        return np.append(RECORDED_SURVIVAL, tail)[:places]
    found = ACCEPT.fullmatch(name)
    length = float(found[1]) if found else 0.0
    if not 1 <= length <= block_size:
        raise ValueError(
            f"the request id names the acceptance profile {name!r}, but no accept length from 1 to "
            f"{block_size}. Use an id such as accept4.2-1 or {RECORDED}-1."
        )
    return np.power(_rate(length, block_size), np.arange(1, block_size), dtype=np.float64)


def _rate(length: float, block_size: int) -> float:
    """Return the a whose powers 0 to block_size - 1 add up to `length`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**k for k in range(block_size)) < length:
            low = middle
        else:
            high = middle
    return high
