"""RMSNorm and RoPE of a layer's queries, keys and values, in place, in one launch.

Fusion. Gemma normalises every head of q and k with a weight and of v without one, then applies RoPE
to q and k. Unfused these are two launches, the first of which is slow with many rows.

Layout contract: qkv [n, (q_heads + 2 * kv_heads) * d], unit column stride, q first, then k, then v;
cos_sin [positions, d], cosines then sines. A program holds both halves of its heads, so that each
element is read only by the program and thread that writes it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.kernels import pdl

# elements per tile: eight heads of dim 256, four of dim 512
TILE = 2048


# fmt: off
@triton.jit
def _norm_and_rotate_qkv(
    qkv, positions, q_weight, k_weight, cos_sin, row_stride, cos_sin_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = half < D // 2
    live = (head < Q_HEADS + 2 * KV_HEADS) & inside
    is_query, is_value = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    table = cos_sin + tl.load(positions + row).to(tl.int64) * cos_sin_stride + half
    cos = tl.where(is_value, 1.0, tl.load(table, mask=inside, other=0.0).to(tl.float32))
    sin = tl.where(is_value, 0.0, tl.load(table + D // 2, mask=inside, other=0.0).to(tl.float32))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + row * row_stride + head * D + half
    first = tl.load(at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=live, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / D + eps)[:, None]
    kind = qkv.dtype.element_ty
    first *= scale * _weight(q_weight, k_weight, half, inside, is_query, is_value)
    second *= scale * _weight(q_weight, k_weight, half + D // 2, inside, is_query, is_value)
    # round between norm and RoPE, as the twin does
    first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(kind), mask=live)
    tl.store(at + D // 2, (second * cos + first * sin).to(kind), mask=live)


@triton.jit
def _weight(q_weight, k_weight, column, inside, is_query, is_value):
    q = tl.load(q_weight + column, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_weight + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, q, tl.where(is_value, 1.0, k))


def norm_and_rotate_qkv(
    qkv: Tensor,
    positions: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    q_heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    """Triton version of `reference.norm_and_rotate_qkv`."""
    heads = q_heads + 2 * kv_heads
    dim = qkv.shape[1] // heads
    block_half = triton.next_power_of_2(dim // 2)
    block_heads = max(1, TILE // (2 * block_half))
    _norm_and_rotate_qkv[(qkv.shape[0], triton.cdiv(heads, block_heads))](
        *(qkv, positions, q_weight, k_weight, cos_sin, qkv.stride(0), cos_sin.stride(0), eps),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=dim,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
        **pdl.launch_options(qkv.device.type),
    )
