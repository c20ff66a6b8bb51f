"""Thin GEMMs: few rows with a large weight, as in the verify pass of a small batch.

With 16 rows a GEMM is bound by the read of its weight, and launch and epilogue cost as much as an
inefficient read. So the weight is the tall operand of the tensor cores, the rows the narrow one. A
weight with few rows uses split-K, and the norm that follows reduces the partial sums
(`residual_norm.py`) instead of a separate launch.

With programmatic dependent launch (`pdl.py`) each program prefetches the start of its weight, which
has no dependency, into L2 and only then waits for its rows. The weight is streamed while attention
or a norm, which need little memory bandwidth, still run.

Layout contract: x [n, K] and weight [N, K], unit column stride, 16-byte aligned rows, K a multiple
of the tile's block_k. Accumulation is in fp32.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.kernels import cards, pdl
from sglang_dflash.kernels.cards import Card

MAX_ROWS = 64
MEASURED_ROWS = 16  # with more, the library's GEMMs did as well


@dataclass(frozen=True)
class Tile:
    block_n: int  # rows of the weight per program
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    prefetch: int = 0  # elements of each weight row to prefetch into L2 before waiting


# (N, K) -> tuned on an H200 at 16 rows, except (20480, 5376), which copies its neighbour; other
# shapes are left to the library, and so are other cards, whose libraries were not measured
TILES: dict[tuple[int, int], Tile] = {
    (16384, 5376): Tile(block_n=64, block_k=128, splits=1, num_warps=4, num_stages=4, prefetch=256),
    (20480, 5376): Tile(block_n=64, block_k=128, splits=1, num_warps=4, num_stages=4, prefetch=256),
    (5376, 8192): Tile(block_n=64, block_k=128, splits=3, num_warps=4, num_stages=4, prefetch=256),
    (5376, 16384): Tile(block_n=64, block_k=128, splits=3, num_warps=4, num_stages=4, prefetch=256),
    (5376, 21504): Tile(block_n=64, block_k=128, splits=3, num_warps=4, num_stages=4, prefetch=128),
}


# fmt: off
@triton.jit
def _product(
    x, weight, out, num_rows, x_stride, weight_stride,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M).to(tl.int64)
    live_column, live_row = column < N, row < num_rows
    begin = K // BLOCK_K * split // SPLITS
    end = K // BLOCK_K * (split + 1) // SPLITS
    at = weight + column * weight_stride
    if PDL:
        if PREFETCH > 0:
            heads = tl.where(live_column, column, 0) * weight_stride + begin * BLOCK_K
            _prefetch_l2(weight + heads, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()

    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(begin, end):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        rows = tl.load(
            x + row[:, None] * x_stride + k[None, :], mask=live_row[:, None], other=0.0,
            eviction_policy="evict_last",
        )
        rows = tl.trans(rows)
        part = tl.load(
            at[:, None] + k[None, :], mask=live_column[:, None], other=0.0,
            eviction_policy="evict_first",
        )
        total = tl.dot(part, rows, total, input_precision="ieee")
    place = (split * num_rows + row[None, :]) * N + column[:, None]
    live = live_column[:, None] & live_row[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _prefetch_l2(rows, COUNT: tl.constexpr):
    """Prefetch `COUNT` elements from each address into L2."""
    size = tl.full(rows.shape, COUNT * rows.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [rows.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )


def thin_linear(x: Tensor, weight: Tensor) -> Tensor | None:
    """Triton version of `reference.thin_linear`; None for untuned cards, row counts and shapes."""
    tile = tiles_on(cards.current()).get((weight.shape[0], weight.shape[1]))
    return None if tile is None or x.shape[0] > MEASURED_ROWS else multiply(x, weight, tile)


def tiles_on(card: Card) -> dict[tuple[int, int], Tile]:
    """Return the tile of each shape that was measured on this kind of card."""
    return TILES if card == cards.TUNED_ON else {}


def served(card: Card) -> str:
    """Return which GEMMs are ours, and what runs the others."""
    if not tiles_on(card):
        return f"not measured on {card}"
    shapes = ", ".join(f"{width} x {depth}" for width, depth in TILES)
    return f"up to {MEASURED_ROWS} rows and weights of {shapes}; other GEMMs run in the library"


def multiply(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """Return split-K partial sums [S, n, N] of the GEMM: fp32, or x's dtype for a single one."""
    rows, depth = x.shape
    width = weight.shape[0]
    dtype = x.dtype if tile.splits == 1 else torch.float32
    out = torch.empty(tile.splits, rows, width, dtype=dtype, device=x.device)
    assert rows <= MAX_ROWS and depth % tile.block_k == 0, (x.shape, tile)
    # no program may prefetch past its own share of K
    assert tile.prefetch <= depth // tile.block_k // tile.splits * tile.block_k, tile
    _product[(triton.cdiv(width, tile.block_n), tile.splits)](
        *(x, weight, out, rows, x.stride(0), weight.stride(0)),
        N=width,
        K=depth,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLITS=tile.splits,
        PREFETCH=tile.prefetch,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl.launch_options(x.device.type),
    )
    return out
