"""Numbers that the command line takes, read for argparse.

Each is refused at once if no plan can be made with it, with what to pass instead. Without torch, as
the command line is.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

# no machine has so much: what is larger was meant in another unit
MOST_GIB = 1e6
# types of the KV cache whose size the memory plan knows. SGLang has others, with scales beside the
# values
KV_TYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

Number = TypeVar("Number", int, float)


def positive(text: str) -> int:
    """Read a count."""
    return _read(text, int, lambda value: value >= 1, wanted="a count: pass 1 or more")


def count_or_none(text: str) -> int:
    """Read a count of which 0 means that there is no limit."""
    return _read(text, int, lambda value: value >= 0, wanted="a count: pass 0 or more")


def seconds(text: str) -> float:
    """Read a time to wait."""
    wanted = "a time to wait: pass more than 0 seconds"
    return _read(text, float, lambda value: 0 < value < math.inf, wanted=wanted)


def share(text: str) -> float:
    """Read a part of a whole, of which something is left."""
    wanted = "a fraction: pass a number between 0 and 1"
    return _read(text, float, lambda value: 0 < value < 1, wanted=wanted)


def ratio(text: str) -> float:
    """Read what one thing is of another."""
    wanted = "a ratio: pass more than 0"
    return _read(text, float, lambda value: 0 < value < math.inf, wanted=wanted)


def memory_size(text: str) -> float:
    """Read a size of memory in GiB."""
    wanted = f"a size: pass more than 0 and at most {MOST_GIB:.0f} GiB"
    return _read(text, float, lambda value: 0 < value <= MOST_GIB, wanted=wanted)


def _read(
    text: str, kind: Callable[[str], Number], is_good: Callable[[Number], bool], *, wanted: str
) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_good(value):
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return value
