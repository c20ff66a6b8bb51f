"""Tiling of verify attention: one tile config per head dim and kind of card, and which layers have
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from sglang_dflash.kernels.cards import Card
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
    # bytes it compiles to at most, over the cards and KV dtypes it serves; tests/kernels/
    # test_compile.py holds it to that
    shared_memory: int = 0


class Tiles(NamedTuple):
    """The tile of each head dim, rounded up to a power of two."""

    wide: dict[int, Tile]
    # for requests of few rows, at most `block_m` packed ones, where it pays: more CTAs per SM hide
    # each other's latency
    narrow: dict[int, Tile]


# narrow requests have a launch of their own if all requests are of that kind, or from this many
# requests on: two launches of a few programs each take longer than one
SPLIT_REQUESTS = 48

# tuned on an H200 with `python -m benchmarks.kernels --sweep`
# fmt: off
WGMMA = Tiles(
    wide={
        64: Tile(64, 64, num_warps=4, num_stages=3, ctas_per_sm=2, min_run=128,
                 shared_memory=57_376),
        128: Tile(64, 64, num_warps=4, num_stages=3, ctas_per_sm=2, min_run=128,
                  shared_memory=114_720),
        256: Tile(64, 32, num_warps=4, num_stages=2, ctas_per_sm=2, min_run=64,
                  shared_memory=98_304),
        512: Tile(128, 32, num_warps=8, num_stages=2, ctas_per_sm=1, min_run=32, dv_parts=2,
                  shared_memory=229_920),
    },
    narrow={
        256: Tile(16, 32, num_warps=4, num_stages=3, ctas_per_sm=4, min_run=64,
                  shared_memory=74_752),
        512: Tile(16, 32, num_warps=4, num_stages=2, ctas_per_sm=3, min_run=32,
                  shared_memory=82_944),
    },
)
# compiled, not timed: as on Hopper, but with the registers of eight warps for 256 columns
TCGEN05 = WGMMA._replace(
    wide={**WGMMA.wide, 256: replace(WGMMA.wide[256], num_warps=8, shared_memory=98_848)}
)
# compiled, not timed. Queries, accumulator and one tile of keys are in registers: fewer rows and
# more warps than on Hopper keep them from spilling. All fit in the 99 KiB of a consumer card, with
# two tiles of keys and values under way. One wide tile of so few rows serves narrow requests, too
MMA = Tiles(
    wide={
        64: Tile(64, 64, num_warps=4, num_stages=3, ctas_per_sm=2, min_run=128,
                 shared_memory=40_960),
        128: Tile(64, 64, num_warps=8, num_stages=3, ctas_per_sm=1, min_run=128,
                  shared_memory=90_112),
        256: Tile(32, 32, num_warps=8, num_stages=3, ctas_per_sm=1, min_run=64,
                  shared_memory=83_968),
        512: Tile(32, 16, num_warps=8, num_stages=3, ctas_per_sm=1, min_run=32,
                  shared_memory=99_328),
    },
    narrow={},
)
MMA_163_KIB = Tiles(
    wide={
        512: Tile(32, 32, num_warps=8, num_stages=3, ctas_per_sm=1, min_run=32,
                  shared_memory=165_888),
    },
    narrow={},
)
# fmt: on
# in order of preference: a head dim has the first tile that fits in the card's shared memory
BY_TENSOR_CORES = {"wgmma": (WGMMA,), "tcgen05": (TCGEN05,), "mma": (MMA_163_KIB, MMA)}
# for precision, not speed: fp32 does not use tensor cores, and large tiles spill registers
TILE_FP32 = Tile(block_m=16, block_n=32, num_warps=4, num_stages=1, ctas_per_sm=2, min_run=64)
FP32 = Tiles(
    wide={
        dim: replace(TILE_FP32, shared_memory=size)
        for dim, size in {64: 20_480, 128: 40_960, 256: 81_920, 512: 98_304}.items()
    },
    narrow={},
)
# compiled, not timed: with four warps the compiler uses 32 registers and spills ten thousand bytes
FP32_TCGEN05 = Tiles(wide={512: replace(TILE_FP32, num_warps=8, shared_memory=163_840)}, narrow={})


def choose_tiles(card: Card, dtype: torch.dtype) -> Tiles:
    """Return the tiles for queries of this dtype that fit in the card's shared memory."""
    preferred = BY_TENSOR_CORES[card.tensor_cores]
    if dtype == torch.float32:
        preferred = (FP32_TCGEN05, FP32) if card.tensor_cores == "tcgen05" else (FP32,)
    found = Tiles({}, {})
    for tiles in reversed(preferred):
        for chosen, known in zip(found, tiles, strict=True):
            fits = {d: t for d, t in known.items() if t.shared_memory <= card.shared_memory}
            chosen.update(fits)
    return found


def count_row_tiles(shape: LayerShape, tile: Tile, rows: int) -> int:
    """Return how many tiles the packed rows of a KV head take."""
    return triton.cdiv(shape.num_q_heads // shape.num_kv_heads * rows, tile.block_m)


def count_value_parts(shape: LayerShape, tile: Tile) -> int:
    """Return how many programs split the value dim."""
    return min(tile.dv_parts, padded(shape.v_head_dim) // 16)


def can_serve(shape: LayerShape, tiles: Mapping[int, Tile]) -> bool:
    """Return whether the KV heads divide the query heads and the head dim has a tile."""
    return shape.num_q_heads % shape.num_kv_heads == 0 and tile_dim(shape) in tiles


def tile_dim(shape: LayerShape) -> int:
    """Return the padded head dim by which a layer's tile is looked up."""
    return max(64, triton.next_power_of_2(max(shape.head_dim, shape.v_head_dim)))
