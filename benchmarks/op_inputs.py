"""Inputs for a batch of blocks, with the shapes and dtypes that a step passes to the ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dflash.kernels import Noise


@dataclass(frozen=True)
class Sizes:
    """Sizes of Gemma-4-31B and its drafter."""

    hidden: int = 5376
    mlp: int = 21504
    q_heads: int = 32
    kv_heads: int = 16
    head_dim: int = 256
    vocabulary: int = 262_144
    logit_cap: float = 30.0
    features: int = 6
    draft_layers: int = 5
    draft_kv_heads: int = 8
    draft_head_dim: int = 128
    context: int = 512
    block_size: int = 16
    weight_copies: int = 3


class Inputs:
    """One batch, and random tensors of its shapes."""

    def __init__(self, requests: int, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.requests, self.rows = requests, requests * sizes.block_size
        self.lens = self.whole(sizes.context, requests).clamp_(min=sizes.context // 2)
        self.pool_rows = torch.arange(requests, device=device)
        width = sizes.context + sizes.block_size
        self.table = torch.arange(requests * width, device=device).int().view(requests, width)
        self.positions = self.whole(sizes.context, self.rows)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def whole(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device)

    def noise(self, scale: float = 0.9) -> Noise:
        keys = self.whole(2**62, self.requests, self.sizes.block_size)
        return Noise(keys, torch.full((self.requests,), scale, device=self.device))

    def cos_sin(self, dim: int) -> Tensor:
        return torch.rand(self.sizes.context, dim, device=self.device)

    def block(self) -> dict[str, Tensor]:
        shape = (self.requests, self.sizes.block_size)
        return {name: self.whole(9, *shape) for name in ("token_ids", "positions", "slots")}
