"""Gumbel noise that two kernels can share without storing it: a hash of a row's key and a column.

The argmax of logits / T + Gumbel noise is a draw from their softmax at temperature T (Gumbel-max).
A draft and the target's own token that are sampled with the same noise agree more often the more
their distributions overlap, though either alone is an exact draw.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gumbel(key, column):
    """Do what `draws.gumbel` does, for int64 keys and int32 columns that broadcast."""
    h = column.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = (h ^ (h >> 16)) + (key >> 32).to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x2C1B3C6D
    h = (h ^ (h >> 12)) * 0x297A2D39
    h = h ^ (h >> 15)
    u = tl.minimum(h.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    # 1 - u rounds to 1 for small u, which decide the argmax: use the series
    waited = tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u / 3.0)), -tl.log(1.0 - u))
    return -tl.log(waited)
