"""Simulated acceptance, for benchmarks: how many drafts count as correct, whatever they are.

The output is nonsense, the work of a step is real. Both kinds are deterministic, so ranks need no
communication to agree, and a step's lengths do not depend on its width, only on their cut. Drawn
acceptance also has the drafter's confidence in each draft, as informative as a real drafter's.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RECORDED = "recorded"
# survival by draft position, recorded with the SmolLM2 pair; it then falls on by the last ratio
RECORDED_SURVIVAL = (0.72, 0.49, 0.33, 0.22, 0.13, 0.09, 0.06, 0.04, 0.03, 0.02)
ACCEPT = re.compile(r"accept(\d+(?:\.\d+)?)")
DECK = 32  # draws of a request over which its mean is kept close to the profile's
DECKS = 1024
KEPT_REQUESTS = 4096  # above it, requests that are not running are forgotten

# a draft's log odds of being correct are those of its position, plus a normal part of its block and
# one of its own. With these deviations the recorded profile has what was recorded with the SmolLM2
# pair: confidence ranks a token's acceptance with an AUC of .83, the product of confidences a
# prefix's survival with .96, and expected and true lengths of a block correlate with .68
BLOCK_DEVIATION = 1.3
DRAFT_DEVIATION = 1.2
CONFIDENCE_SHIFT = -0.75  # of confidence's log odds: the recorded drafter is too modest
CONFIDENCE_DEVIATION = 0.2
MOST_LOG_ODDS = 30.0  # sigmoid is 1 in float32
HALVINGS = 26  # of the log odds' range: exact to 1e-6
LEAST_SURVIVAL = 1e-6  # of the first draft, below which a profile is always wrong

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Simulated(NamedTuple):
    """What is simulated of a step."""

    num_correct: Ints  # drafts of each request, [b]
    # the drafter's peak probability for each draft, [b, block_size - 1]; None: not simulated
    confidence: Floats | None


class SteadyAcceptance:
    """Every request commits the same number of tokens, `accept_length` on average."""

    def __init__(self, accept_length: float) -> None:
        self._accept_length = accept_length
        self._steps = 0

    def draw(self, request_ids: Sequence[str], width: int) -> Simulated:
        """Return the next step, of this width."""
        before = int(self._steps * self._accept_length)
        self._steps += 1
        num_tokens = int(self._steps * self._accept_length) - before
        return Simulated(np.full(len(request_ids), min(max(num_tokens, 1), width) - 1), None)


class DrawnAcceptance:
    """Each request draws its number of correct drafts in each step from a survival profile.

    The request's id names its profile: `accept4.2-ANYTHING` is geometric, with a mean of 4.2 tokens
    per step at the full block size, and any other id has the recorded profile. Draws come from a
    table of shuffled decks: the DECK draws of a deck spread evenly over the distribution, so that
    short measurements have little noise. A request's id also sets where in the table it starts.
    A table is made, in tenths of a second, when a profile is first drawn from.
    """

    def __init__(self, block_size: int = 16) -> None:
        self._block_size = block_size
        self._profiles: dict[str, int] = {}
        # a row per profile
        self._lengths = np.zeros((0, DECK * DECKS), dtype=np.int64)
        self._confidences = np.zeros((0, DECK * DECKS, block_size - 1), dtype=np.float32)
        self._rows: dict[str, int] = {}  # request id -> row of the two arrays below
        self._profile_of = np.zeros(0, dtype=np.int64)
        self._next_draw = np.zeros(0, dtype=np.int64)
        self._batch: tuple[list[str], Ints] = ([], np.zeros(0, dtype=np.int64))

    def draw(self, request_ids: Sequence[str], width: int | None = None) -> Simulated:
        """Return the next step. A width only limits the drafts that can be correct."""
        rows = self._rows_of(request_ids)
        draws = self._next_draw[rows]
        self._next_draw[rows] = (draws + 1) % self._lengths.shape[1]
        chosen = self._profile_of[rows], draws
        lengths = np.minimum(self._lengths[chosen], (width or self._block_size) - 1)
        return Simulated(lengths, self._confidences[chosen])

    def _rows_of(self, request_ids: Sequence[str]) -> Ints:
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
            lengths, confidences = table_of(name, self._block_size)
            self._lengths = np.concatenate([self._lengths, lengths[None]])
            self._confidences = np.concatenate([self._confidences, confidences[None]])
            self._profiles[name] = len(self._profiles)
        return self._profiles[name]


class Table(NamedTuple):
    """A profile's draws, deck after deck."""

    lengths: Ints  # correct drafts, [DECK * DECKS]
    confidences: Floats  # [DECK * DECKS, block_size - 1]


@cache
def table_of(name: str, block_size: int) -> Table:
    """Return a profile's table.

    Each draw has probabilities of its own for its drafts to be correct, its length is drawn from
    these, and its confidences are these, shifted and with noise. A profile that is always wrong has
    the recorded profile's confidences: a drafter that does not know it.
    """
    survival = survival_of(name, block_size)
    if survival[0] < LEAST_SURVIVAL:
        recorded = table_of(RECORDED, block_size)
        return Table(np.zeros_like(recorded.lengths), recorded.confidences)
    generator = np.random.default_rng(0)
    log_odds, surviving = _latent(survival, generator)
    expected = surviving.sum(axis=0)
    # draws of about the same expected length spread evenly over what can come of them
    uniforms = np.empty(DECK * DECKS)
    uniforms[np.argsort(expected)] = _even(generator)
    lengths = (uniforms < surviving).sum(axis=0)
    noise = CONFIDENCE_DEVIATION * generator.standard_normal(log_odds.shape, dtype=np.float32)
    confidences = _sigmoid(log_odds + np.float32(CONFIDENCE_SHIFT) + noise)
    # each deck has one draw of each of DECK ranges of lengths
    ranges = np.lexsort((expected, lengths)).reshape(DECK, DECKS)
    decks = generator.permuted(generator.permuted(ranges, axis=1).T, axis=1).ravel()
    return Table(lengths[decks], np.ascontiguousarray(confidences.T[decks]))


def _latent(survival: NDArray[np.float64], generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the log odds of each draft of each draw, and the probability that the drafts up to it
    are correct, whose mean is `survival`; [block_size - 1, DECK * DECKS]."""
    shape = len(survival), DECK * DECKS
    log_odds = BLOCK_DEVIATION * generator.standard_normal(shape[1], dtype=np.float32)
    log_odds = log_odds + DRAFT_DEVIATION * generator.standard_normal(shape, dtype=np.float32)
    surviving = np.empty(shape, dtype=np.float32)
    before = np.ones(shape[1], dtype=np.float32)
    for place, share in enumerate(survival):
        low, high = -MOST_LOG_ODDS, MOST_LOG_ODDS
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            now = before * _sigmoid(log_odds[place] + np.float32(middle))
            if now.mean(dtype=np.float64) < share:
                low = middle
            else:
                high = middle
        log_odds[place] += np.float32(high)
        before = surviving[place] = before * _sigmoid(log_odds[place])
    return log_odds, surviving


def _even(generator: np.random.Generator) -> NDArray[np.float64]:
    """Return uniform numbers, DECK * DECKS of them; each DECK of them spread evenly."""
    strata = np.tile(np.arange(DECK, dtype=np.float64), (DECKS, 1))
    strata = generator.permuted(strata, axis=1)
    return ((strata + generator.random(strata.shape)) / DECK).ravel()


def _sigmoid(log_odds: Floats) -> Floats:
    return np.reciprocal(1 + np.exp(-log_odds))


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
