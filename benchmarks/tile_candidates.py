"""The tiles of verify attention that `python -m benchmarks.kernels --sweep` tries on a card."""

from __future__ import annotations

import itertools

import torch

from sglang_dflash.kernels import cards
from sglang_dflash.kernels.attention.tiles import Tile, choose_tiles


def candidates(dim: int, dtype: torch.dtype) -> list[Tile]:
    """Return the tiles worth compiling: their KV stages and queries can fit in shared memory."""
    card = cards.current()
    present = choose_tiles(card, dtype).wide[dim]
    splits = {"ctas_per_sm": present.ctas_per_sm, "min_run": present.min_run}
    # tensor cores that read registers can use fewer rows
    rows = (32, 64) if card.tensor_cores == "mma" else (64, 128)
    shapes = itertools.product(rows, (16, 32, 64, 128), (4, 8), (2, 3, 4), (1, 2))
    tiles = [
        Tile(block_m=m, block_n=n, num_warps=warps, num_stages=stages, dv_parts=parts, **splits)
        for m, n, warps, stages, parts in shapes
        if m <= 64 or dim == 512
    ]
    return [
        tile
        for tile in tiles
        if 2 * dim * tile.block_m + 2 * kv_elements(tile, dim) < card.shared_memory
        # the accumulator alone: 64 rows of 512 in 4 warps are 256 registers per thread
        and tile.block_m * dim // tile.dv_parts <= tile.num_warps * 32 * 128
        and (tile.dv_parts == 1 or dim == 512)
    ]


def kv_elements(tile: Tile, dim: int) -> int:
    """Return the keys and values in shared memory, of the stages that are always allocated."""
    return max(1, tile.num_stages - 1) * tile.block_n * (dim + dim // tile.dv_parts)
