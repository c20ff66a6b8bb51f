"""Extents of tiles and of scratch."""

from __future__ import annotations

import triton


def padded(extent: int) -> int:
    """Round up to a valid tile extent: a power of two, at least 16 for the tensor cores.

    Also the tile over a block's columns: the same for all widths up to 16, so that a step of
    another width needs no new kernel.
    """
    return max(16, triton.next_power_of_2(extent))


def aligned(extent: int) -> int:
    """Round up to a multiple of 16, so that slices of a larger tensor are aligned for any extent.

    Triton compiles another kernel for a pointer that is not.
    """
    return triton.cdiv(extent, 16) * 16
