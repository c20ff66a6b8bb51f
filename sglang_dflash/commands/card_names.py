"""GPUs by name: their memory and compute capability, for planning on another machine.

Without torch, so that the command line can refuse an unknown name at once.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

# of GPU memory for weights and KV, and of the full-attention pool's tokens for the sliding-window
# pool, where nothing is known of the card or the pair
FRACTION = 0.85
SLIDING_SHARE = 0.8


@dataclass(frozen=True)
class NamedCard:
    """A GPU that is sold under this name."""

    title: str
    size_gb: int  # as it is sold
    gib: float  # what its driver leaves to programs
    capability: tuple[int, int]


CARDS = {
    "3090": NamedCard("RTX 3090", 24, 23.5, (8, 6)),
    "4090": NamedCard("RTX 4090", 24, 23.5, (8, 9)),
    "5090": NamedCard("RTX 5090", 32, 31.4, (12, 0)),
    "l4": NamedCard("L4", 24, 22.0, (8, 9)),
    "a40": NamedCard("A40", 48, 44.4, (8, 6)),
    "a6000": NamedCard("RTX A6000", 48, 47.4, (8, 6)),
    "6000-ada": NamedCard("RTX 6000 Ada", 48, 47.4, (8, 9)),
    "l40s": NamedCard("L40S", 48, 44.4, (8, 9)),
    "a100-40gb": NamedCard("A100 40GB", 40, 39.4, (8, 0)),
    "a100": NamedCard("A100 80GB", 80, 79.1, (8, 0)),
    "h100": NamedCard("H100", 80, 79.1, (9, 0)),
    "rtx-pro-6000": NamedCard("RTX PRO 6000", 96, 94.9, (12, 0)),
    "h200": NamedCard("H200", 141, 139.8, (9, 0)),
    "b200": NamedCard("B200", 180, 178.3, (10, 0)),
}
# the card that stands for a size wherever only the size matters
BY_SIZE = {24: "4090", 32: "5090", 48: "l40s", 80: "h100", 141: "h200", 180: "b200"}
# what may be left out of a name
_MAKERS = re.compile(r"[\s_-]|nvidia|geforce|rtx")


def card_named(text: str) -> str:
    """Return the name under which a card is listed; for argparse."""
    asked = _MAKERS.sub("", text.lower())
    name = next((name for name in CARDS if _MAKERS.sub("", name) == asked), None)
    if name is None:
        raise argparse.ArgumentTypeError(
            f"{text} is not a known card. Pass one of {', '.join(CARDS)}, or --gpu-memory-gb for "
            "any other."
        )
    return name
