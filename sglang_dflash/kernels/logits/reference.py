"""Helpers shared by the ops on logits, in torch: the logit cap and keyed Gumbel noise.

The argmax of logits / T + Gumbel noise is a draw from their softmax at temperature T (Gumbel-max).
Noise is a hash of a row's key and a column, so two ops can share it without storing it. A draft and
the target's own token, if sampled with the same noise, agree more often the more their
distributions overlap, while each alone is an exact draw.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# multipliers of the hash of keys and columns: odd, so that no multiplication loses a bit
HASH_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x2C1B3C6D, 0x297A2D39)


class Noise(NamedTuple):
    """Keyed Gumbel noise: the argmax of logits + scale * noise is a draw at temperature scale."""

    keys: Tensor  # [b, at least the rows per request] int64, one per row
    scales: Tensor  # [b] fp32: the temperature, or 0 for a greedy request


def gumbel(
    keys: Tensor,  # [n] int64
    width: int,
) -> Tensor:
    """Return Gumbel noise that depends only on its row's key and its column, [n, width] fp32."""
    return gumbel_at(keys, torch.arange(width, dtype=torch.int32, device=keys.device))


def gumbel_at(
    keys: Tensor,  # [n] int64
    columns: Tensor,  # [width] or [n, width], of any integers
) -> Tensor:
    """Return the noise of some columns, [n, width] fp32.

    Hashed in 32-bit integers with wraparound.
    """
    low, high = (_word(keys >> shift)[:, None] for shift in (0, 32))
    h = columns.int() * _SIGNED[0] + low
    _mix(h, 16, _SIGNED[1])
    _mix(h, 13, _SIGNED[2])
    _mix(h, 16).add_(high)
    _mix(h, 15, _SIGNED[3])
    _mix(h, 12, _SIGNED[4])
    _mix(h, 15)
    u = (h.long() & 2**32 - 1).float().mul_(2**-32).add_(2**-33).clamp_(max=1 - 2**-24)
    # small u decide the argmax: 1 - u would round them away, log1p keeps them
    return u.neg_().log1p_().neg_().log_().neg_()


def _word(x: Tensor | int) -> Any:
    """Return the low 32 bits as a signed integer."""
    word = ((x & 2**32 - 1) ^ 2**31) - 2**31
    return word.int() if isinstance(word, Tensor) else word


_SIGNED = [_word(factor) for factor in HASH_FACTORS]


def _mix(h: Tensor, shift: int, factor: int = 1) -> Tensor:
    """Fold the high bits into the low ones and multiply, in place."""
    h ^= (h >> shift) & 2 ** (32 - shift) - 1
    h *= factor
    return h


def noise_of_rows(noise: Noise, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the noise of each row [n, width] and its scale [n, 1]."""
    per_request = rows // noise.scales.shape[0]
    scales = noise.scales.repeat_interleave(per_request)[:, None]
    return gumbel(noise.keys[:, :per_request].flatten(), width), scales


def capped(logits: Tensor, logit_cap: float) -> Tensor:
    """Return logits in fp32, soft-capped by tanh if there is a cap. -inf, a token that a head does
    not have, stays -inf."""
    logits = logits.float()
    if logit_cap <= 0:
        return logits
    within = logit_cap * torch.tanh(logits / logit_cap)
    return torch.where(logits == float("-inf"), logits, within)
