"""Degenerate repetition at the end of an answer.

A small target that decodes greedily often falls into a loop until the length limit. A drafter
learns to copy from a few rounds; more only dilute the text that is hard to draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# rounds of a loop to keep
ROUNDS = 3


def useful_length(token_ids: Sequence[int]) -> int:
    """Return the length up to the end of a loop's first ROUNDS rounds; without a loop, all of it.

    A loop is a suffix of more than ROUNDS equal rounds, the last of which may be incomplete. If
    several periods fit, the one that keeps the fewest tokens is taken.
    """
    ids = np.asarray(token_ids)[::-1]
    least = len(ids)
    for period in range(1, len(ids) // ROUNDS + 1):
        differs = np.flatnonzero(ids[:-period] != ids[period:])
        same = int(differs[0]) if len(differs) else len(ids) - period
        # the first round has no predecessor to match
        least = min(least, len(ids) - max(0, same - (ROUNDS - 1) * period))
    return least
