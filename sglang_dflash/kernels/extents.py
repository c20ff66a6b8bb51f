"""Extents of tiles."""

from __future__ import annotations

import triton


def padded(extent: int) -> int:
    """Round up to a valid tile extent: a power of two, at least 16 for the tensor cores.

    Also the tile over a block's columns: the same for all widths up to 16, so that a step of
    another width needs no new kernel.
    """
    return max(16, triton.next_power_of_2(extent))
