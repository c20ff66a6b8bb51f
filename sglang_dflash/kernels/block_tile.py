"""The tile over a block's columns."""

from __future__ import annotations

import triton


def block_of(width: int) -> int:
    """Return the extent of the tile: the same for all widths of a usual block, so that a step of
    another width needs no new kernel."""
    return max(16, triton.next_power_of_2(width))
