"""Programmatic dependent launch (PDL): a kernel starts while the previous one finishes.

Available on Hopper and later. Such a kernel must wait (`gdc_wait`) before it accesses data that an
earlier kernel writes, or overwrites data that an earlier kernel reads. `gdc_launch_dependents` lets
the next kernel start.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang_dflash.kernels import cards
from sglang_dflash.kernels.cards import Card


@functools.cache
def launch_options(device_type: str) -> dict[str, Any]:
    """Return the launch options of a kernel with a `PDL` constexpr."""
    return options_on(cards.current()) if device_type == "cuda" else {"PDL": False}


def options_on(card: Card) -> dict[str, Any]:
    return {"PDL": True, "launch_pdl": True} if card.has_pdl else {"PDL": False}
