"""Tiling of verify attention: one tile config per head dim, and which layers have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import triton

from sglang_dflash.kernels.extents import padded


@dataclass(frozen=True)
class LayerShape:
    """The shape of one kind of attention layer on this rank."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Tile:
    """The tile config of one head dim: the shape of a program, and the target program count."""

    block_m: int  # packed rows; 64 is the minimum for Hopper's wgmma
    block_n: int  # keys per loop iteration
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    min_run: int  # keys; a shorter run costs more in its partial result than it saves
    # programs that split the value dim: with 512 columns, the accumulator of 128 rows (all queries
    # of a KV head) is too large for one program, and tiles of half the rows read every key twice
    dv_parts: int = 1


# by head dim, rounded up to a power of two; tuned with `python -m benchmarks.kernels --sweep`
TILES = {
    64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3, ctas_per_sm=2, min_run=128),
    128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3, ctas_per_sm=2, min_run=128),
    256: Tile(block_m=64, block_n=32, num_warps=4, num_stages=2, ctas_per_sm=2, min_run=64),
    512: Tile(
        block_m=128, block_n=32, num_warps=8, num_stages=2, ctas_per_sm=1, min_run=32, dv_parts=2
    ),
}
# for requests of few rows, at most `block_m` packed ones, where it pays: more CTAs per SM hide each
# other's latency. They have a launch of their own if all requests are of that kind, or from this
# many requests on: two launches of a few programs each take longer than one
SPLIT_REQUESTS = 48
NARROW_TILES = {
    256: Tile(block_m=16, block_n=32, num_warps=4, num_stages=3, ctas_per_sm=4, min_run=64),
    512: Tile(block_m=16, block_n=32, num_warps=4, num_stages=2, ctas_per_sm=3, min_run=32),
}
# for precision, not speed: fp32 does not use tensor cores, and large tiles spill registers
TILE_FP32 = Tile(block_m=16, block_n=32, num_warps=4, num_stages=1, ctas_per_sm=2, min_run=64)


def count_row_tiles(shape: LayerShape, tile: Tile, rows: int) -> int:
    """Return how many tiles the packed rows of a KV head take."""
    return triton.cdiv(shape.num_q_heads // shape.num_kv_heads * rows, tile.block_m)


def count_value_parts(shape: LayerShape, tile: Tile) -> int:
    """Return how many programs split the value dim."""
    return min(tile.dv_parts, padded(shape.v_head_dim) // 16)


def can_serve(shape: LayerShape, tiles: Mapping[int, Tile] = TILES) -> bool:
    """Return whether the KV heads divide the query heads and the head dim has a tile."""
    return shape.num_q_heads % shape.num_kv_heads == 0 and tile_dim(shape, tiles) in tiles


def tile_dim(shape: LayerShape, tiles: Mapping[int, Tile]) -> int:
    """Return the padded head dim by which a layer's tile is looked up."""
    return max(min(tiles), triton.next_power_of_2(max(shape.head_dim, shape.v_head_dim)))
