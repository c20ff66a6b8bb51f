"""The unit of the corpus: one prompt and its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple


class Exchange(NamedTuple):
    prompt: str
    answer: str


# draws one exchange of its kind
Kind = Callable[[Random], Exchange]


def join_words(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return ", ".join(words[:-1]) + " and " + words[-1]
