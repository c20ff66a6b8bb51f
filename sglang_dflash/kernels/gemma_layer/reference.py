"""The fused ops and thin GEMM of a Gemma layer's verify pass, in torch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_dflash.kernels.norms import rms_norm, rotate


def norm_and_rotate_qkv(
    qkv: Tensor,  # [n, (q_heads + 2 * kv_heads) * d], overwritten
    positions: Tensor,  # [n] int64
    *,
    q_weight: Tensor,  # [d]
    k_weight: Tensor,  # [d]
    cos_sin: Tensor,  # [positions, d], cosines then sines
    q_heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    """RMS-norm every head of q and k with its weight, of v without one; apply RoPE to q and k."""
    heads = qkv.unflatten(-1, (q_heads + 2 * kv_heads, -1))
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    q.copy_(rotate(rms_norm(q, q_weight, eps), cos, sin))
    k.copy_(rotate(rms_norm(k, k_weight, eps), cos, sin))
    v.copy_(rms_norm(v, torch.ones_like(k_weight), eps))


def norm_add_norm(
    partial_sums: Tensor,  # [S, n, H], of a split-K GEMM
    residual: Tensor,  # [n, H]
    *,
    norm_weight: Tensor,  # [H]
    next_weights: Sequence[Tensor],  # K of [H]
    scale: Tensor | None,  # [1]
    eps: float,
    expert_branch: tuple[Tensor, Tensor, Tensor] | None = None,  # [n, H], [H], [H]
) -> tuple[Tensor, Tensor]:
    """Return (new residual [n, H], the same after each next norm [K, n, H]) in residual's dtype.

    The new residual is (norm(sum of partial sums) + residual) * scale. `expert_branch` has the
    experts' output, the norm weight of the MLP's sum and the norm weight of that output: with it,
    the sum and the output are first normalised and added.
    """
    x = partial_sums.float().sum(0).to(residual.dtype).float()
    if expert_branch is not None:
        experts, mlp_weight, experts_weight = expert_branch
        x = rms_norm(x, mlp_weight, eps) + rms_norm(experts.float(), experts_weight, eps)
    x = rms_norm(x, norm_weight, eps) + residual.float()
    out = (x if scale is None else x * scale.float()).to(residual.dtype)
    if not next_weights:
        return out, out.new_empty(0, *out.shape)
    return out, torch.stack([rms_norm(out, weight, eps) for weight in next_weights])


def thin_linear(
    x: Tensor,  # [n, K]
    weight: Tensor,  # [N, K]
) -> Tensor | None:
    """Return x @ weight.T as split-K partial sums: here one, [1, n, N] in x's dtype.

    A kernel may return several, in fp32, or None where the library's GEMM is the better choice.
    """
    return torch.matmul(x, weight.T)[None]
