"""RMSNorm and RoPE in torch, shared by several twins."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in fp32, then scale by the weight itself (not 1 + weight)."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply neox RoPE to [..., d] with cosines and sines [..., d / 2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float(), sin.float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
