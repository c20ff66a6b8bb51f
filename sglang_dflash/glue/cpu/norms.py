"""Norms without a GPU, where SGLang has kernels only, or torch paths that do not match them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue import changes
from sglang_dflash.glue.changes import Hook


def install() -> None:
    """Give Gemma 4's router its scale, and MiniMax's queries and keys their norm."""
    install_router_norm()
    kernel = "its kernel needs a GPU"
    changes.attach(
        {
            "minimax_squares": Hook(_sum_squares, kernel),
            "minimax_norm": Hook(_norm_by_squares, kernel),
        }
    )


def install_router_norm() -> None:
    """Give Gemma 4's router its scale where SGLang's torch path runs, on any device."""
    changes.attach(
        {"gemma4_norm": Hook(_norm_with_folded_scale, "a router's norm applies its folded scale")}
    )


def _norm_with_folded_scale(original: Any, norm: Any, x: Tensor) -> Tensor:
    """Apply the weight of a norm without a learned scale, as the kernel does: it is ones, or the
    router's folded scale, which the original ignores."""
    rows = original(norm, x)
    return rows if norm.with_scale else (rows * norm.weight).type_as(x)


def _sum_squares(_original: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the sums of squares of all rows of queries, then of keys, to be summed over ranks."""
    return torch.cat([x.float().square().sum(dim=-1) for x in (queries, keys)])


def _norm_by_squares(
    _original: Any,
    queries: Tensor,
    keys: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    squares: Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, ...]:
    """Norm each row over the heads of all ranks."""
    given = zip((queries, keys), (query_weight, key_weight), squares.chunk(2), strict=True)
    return tuple(
        (x * (total / x.shape[-1] / ranks + eps).rsqrt()[:, None] * weight).type_as(x)
        for x, weight, total in given
    )
