"""Feature injection: the kernels around the GEMMs that turn features into draft KV.

Fusion. The GEMMs themselves are cuBLAS's. `context_hidden` normalises the shared projection in one
launch. `write_context` applies k-norm, RoPE, the cast to the cache's dtype and the scatter to all
layers' projected keys and values in one launch. Every layer has its own cache; their offsets from
the first one are in a small table that is built once.

Layout contract: features [n, K * H] and projected [L, n, 2 * kv_heads * d] contiguous rows, keys
first; cos_sin [positions, d], cosines then sines; caches [slots, kv_heads, d], of equal dtype
and strides, dense except for the slot stride. Discarded rows carry the scratch slot, which several
rows may write.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_rows(rows, weight, out, row_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    x = tl.load(rows + row * row_stride + column, mask=live, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + column, (x * scale * w).to(out.dtype.element_ty), mask=live)


# fmt: off
@triton.jit
def _write_context(
    projected, positions, slots, key_cache, value_cache, k_norm_weight, distances, cos_sin,
    layer_stride, row_stride, cos_sin_stride, key_stride, value_stride, eps,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    # asserted when the table is built: vectorised stores need it
    key_cache += tl.multiple_of(tl.load(distances + 3 * layer), 16)
    value_cache += tl.multiple_of(tl.load(distances + 3 * layer + 1), 16)
    k_norm_weight += tl.load(distances + 3 * layer + 2)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    live = (head < KV_HEADS) & (half < D // 2)
    at = head * D + half

    # the two halves that RoPE rotates into each other
    keys = projected + layer * layer_stride + row * row_stride
    first = tl.load(keys + at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(keys + at + D // 2, mask=live, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / D + eps)[:, None]
    inside = half < D // 2
    w_first = tl.load(k_norm_weight + half, mask=inside, other=0.0).to(tl.float32)
    w_second = tl.load(k_norm_weight + half + D // 2, mask=inside, other=0.0).to(tl.float32)
    # round between norm and RoPE, as the twin does
    kind = projected.dtype.element_ty
    first = (first * scale * w_first).to(kind).to(tl.float32)
    second = (second * scale * w_second).to(kind).to(tl.float32)
    table = cos_sin + position * cos_sin_stride + half
    cos = tl.load(table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(table + D // 2, mask=inside, other=0.0).to(tl.float32)
    key_at = key_cache + slot * key_stride + at
    cached = key_cache.dtype.element_ty
    tl.store(key_at, (first * cos - second * sin).to(kind).to(cached), mask=live)
    tl.store(key_at + D // 2, (second * cos + first * sin).to(kind).to(cached), mask=live)

    values = keys + KV_HEADS * D
    value_at = value_cache + slot * value_stride + at
    for part in tl.static_range(2):
        v = tl.load(values + at + part * (D // 2), mask=live, other=0.0)
        tl.store(value_at + part * (D // 2), v.to(value_cache.dtype.element_ty), mask=live)


def context_hidden(
    features: Tensor, *, fc_weight: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """Triton version of `reference.context_hidden`."""
    rows = torch.matmul(features.to(fc_weight.dtype), fc_weight.T)
    out = torch.empty_like(rows)
    _norm_rows[(rows.shape[0],)](
        *(rows, norm_weight, out, rows.stride(0), eps, rows.shape[1]),
        triton.next_power_of_2(rows.shape[1]),
        num_warps=8,
    )
    return out


@functools.lru_cache(maxsize=64)
def _distances(addresses: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], device):
    """Return the offsets in elements of each layer's tensors from the first layer's, [L, kinds]."""
    rows = [
        [(at - first) // size for at, first, size in zip(layer, addresses[0], sizes, strict=True)]
        for layer in addresses
    ]
    assert all(keys % 16 == values % 16 == 0 for keys, values, _ in rows), rows
    return torch.tensor(rows, dtype=torch.int64, device=device)


def write_context(
    projected: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    *,
    k_norm_weights: Sequence[Tensor],
    cos_sin: Tensor,
    eps: float,
) -> None:
    """Triton version of `reference.write_context`."""
    firsts = (key_caches[0], value_caches[0], k_norm_weights[0])
    layers = zip(key_caches, value_caches, k_norm_weights, strict=True)
    distances = _distances(
        tuple(tuple(tensor.data_ptr() for tensor in layer) for layer in layers),
        tuple(tensor.element_size() for tensor in firsts),
        projected.device,
    )
    kv_heads, dim = firsts[0].shape[1:]
    _write_context[projected.shape[1], projected.shape[0]](
        *(projected, positions, slots, *firsts, distances, cos_sin),
        *(projected.stride(0), projected.stride(1), cos_sin.stride(0)),
        *(firsts[0].stride(0), firsts[1].stride(0), eps),
        KV_HEADS=kv_heads,
        D=dim,
        BLOCK_HEADS=triton.next_power_of_2(kv_heads),
        BLOCK_HALF=triton.next_power_of_2(dim // 2),
        num_warps=4,
    )
