"""Torch versions of what SGLang's sampling lacks without a GPU: seeded noise and grammar masks.

On a GPU both are Triton kernels; these compute the same functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue import changes
from sglang_dflash.glue.changes import Hook

WORD = 0xFFFFFFFF


def install() -> None:
    """Make --enable-deterministic-inference and xgrammar work on a CPU."""
    why = "allows deterministic inference on a CPU"
    changes.register("add_deterministic_choices", ["torch_native"], why=why)
    changes.register("add_radix_deterministic_choices", ["torch_native"], why=why)
    changes.attach(
        {
            "batch_invariant_mode": Hook(_skip_batch_invariant_mode, "its kernels need a GPU"),
            "murmur_hash32": Hook(_murmur_hash32, "seeded noise in torch"),
            "allocate_token_bitmask": Hook(_allocate_token_bitmask, "no pinned memory on a CPU"),
            "apply_vocab_mask": Hook(_apply_vocab_mask, "grammar masks in torch"),
        }
    )


def _skip_batch_invariant_mode(original: Any, runner: Any) -> None:
    """Do nothing: its kernels are Triton's. In fp32 the batch affects a row only by rounding."""


def _murmur_hash32(original: Any, seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hash (seed, position, column) to 32 bits: MurmurHash3 over four words, [n, m] uint32."""
    seed = seed.to(torch.int64)[:, None]
    state = torch.zeros_like(seed)
    words = (seed & WORD, (seed >> 32) & WORD, positions.long()[:, None] & WORD, columns.long())
    for word in words:
        word = _times(word, 0xCC9E2D51)
        word = _times(_rotate(word, 15), 0x1B873593)
        state = (_times(_rotate(state ^ word, 13), 5) + 0xE6546B64) & WORD
    # mix in the length in bytes, then the final avalanche
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = _times(state ^ (state >> shift), factor)
    return (state ^ (state >> 16)).to(torch.uint32)


def _times(x: Tensor, factor: int) -> Tensor:
    """Multiply modulo 2^32, in 16-bit halves so that the products fit in 63 bits."""
    low, high = x & 0xFFFF, x >> 16
    return (low * factor + ((high * factor & 0xFFFF) << 16)) & WORD


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & WORD


def _allocate_token_bitmask(original: Any, vocab_size: int, batch_size: int) -> Tensor:
    """Allocate without pinned memory, which needs a GPU."""
    import xgrammar

    shape = xgrammar.get_bitmask_shape(batch_size, vocab_size)
    return torch.full(shape, -1, dtype=xgrammar.bitmask_dtype)


def _apply_vocab_mask(original: Any, grammar: Any, logits: Tensor, vocab_mask: Tensor) -> None:
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)
