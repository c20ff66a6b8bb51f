"""Feature injection in torch: the specification, and the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sglang_dflash.kernels.norms import rms_norm, rotate


def context_hidden(
    features: Tensor,  # [n, K * H]
    *,
    fc_weight: Tensor,  # [H, K * H]
    norm_weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """Return the projected, normed features [n, H] from which every layer computes its draft KV."""
    return rms_norm(features.to(fc_weight.dtype) @ fc_weight.T, norm_weight, eps)


def write_context(
    projected: Tensor,  # [L, n, 2 * kv_heads * d], keys then values of each layer
    positions: Tensor,  # [n] int64
    slots: Tensor,  # [n] int64; the scratch slot for discarded rows
    key_caches: Sequence[Tensor],  # L of [slots, kv_heads, d], written
    value_caches: Sequence[Tensor],  # L of [slots, kv_heads, d], written
    *,
    k_norm_weights: Sequence[Tensor],  # L of [d]
    cos_sin: Tensor,  # [max positions, d], cosines then sines
    eps: float,
) -> None:
    """Apply k-norm and RoPE to the keys, and write keys and values at their slots."""
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    layers = zip(projected, key_caches, value_caches, k_norm_weights, strict=True)
    for rows, key_cache, value_cache, weight in layers:
        keys, values = rows.unflatten(-1, (2, *key_cache.shape[1:])).unbind(dim=1)
        key_cache[slots] = rotate(rms_norm(keys, weight, eps), cos, sin).to(key_cache.dtype)
        value_cache[slots] = values.to(value_cache.dtype)
