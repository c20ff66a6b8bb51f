"""Answers that ran into a loop: where a sequence begins to do nothing but repeat itself.

A small target, decoding greedily, often ends like this and goes on until it is cut. A drafter
learns to copy from a few rounds; all further ones only take time from what is hard to draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# rounds of a loop that are kept
ROUNDS = 3


def useful_length(token_ids: Sequence[int]) -> int:
    """Return how many tokens there are up to the end of the loop's first ROUNDS rounds.

    A loop is an end of the sequence that consists of more than ROUNDS equal rounds, the last of
    which may be incomplete. Of several readings the one that leaves the least is taken.
    """
    ids = np.asarray(token_ids)[::-1]
    least = len(ids)
    for period in range(1, len(ids) // ROUNDS + 1):
        differs = np.flatnonzero(ids[:-period] != ids[period:])
        same = int(differs[0]) if len(differs) else len(ids) - period
        # the first round has none before it to equal
        least = min(least, len(ids) - max(0, same - (ROUNDS - 1) * period))
    return least
