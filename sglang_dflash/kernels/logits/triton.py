"""Helpers shared by the kernels on logits: logit cap, Gumbel noise, argmax, softmax, row splitting.

A row of logits is split into parts, one program each, so that few rows still fill the GPU.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from sglang_dflash.kernels.logits.reference import HASH_FACTORS

# target number of programs: about eight per SM of an H200
PROGRAMS = 1056
# stands for -inf where a difference to it must not be NaN
LOWEST = tl.constexpr(-1e30)
_FACTOR_0, _FACTOR_1, _FACTOR_2, _FACTOR_3, _FACTOR_4 = map(tl.constexpr, HASH_FACTORS)


@triton.jit
def capped(x, LOGIT_CAP: tl.constexpr):
    """Return logits in fp32, soft-capped by tanh if there is a cap. -inf, a token that a head does
    not have, stays -inf."""
    x = x.to(tl.float32)
    if LOGIT_CAP > 0:
        # tanh via sigmoid, which saturates without overflow
        within = (2.0 * tl.sigmoid(2.0 * (x / LOGIT_CAP)) - 1.0) * LOGIT_CAP
        x = tl.where(x == float("-inf"), x, within)
    return x


@triton.jit
def scaled(x, temperature, LOGIT_CAP: tl.constexpr):
    """Return logits capped and divided by the temperature; -inf for NaN."""
    x = capped(x, LOGIT_CAP) / temperature
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def gumbel(key, column):
    """Triton version of `reference.gumbel`, for int64 keys and int32 columns that broadcast."""
    h = column.to(tl.uint32) * _FACTOR_0 + key.to(tl.uint32)
    h = (h ^ (h >> 16)) * _FACTOR_1
    h = (h ^ (h >> 13)) * _FACTOR_2
    h = (h ^ (h >> 16)) + (key >> 32).to(tl.uint32)
    h = (h ^ (h >> 15)) * _FACTOR_3
    h = (h ^ (h >> 12)) * _FACTOR_4
    h = h ^ (h >> 15)
    u = tl.minimum(h.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    # 1 - u rounds to 1 for small u, which decide the argmax: use the series
    waited = tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u / 3.0)), -tl.log(1.0 - u))
    return -tl.log(waited)


@triton.jit
def keep_better(x, column, best, at):
    """Update each lane's maximum and its column; on ties a lane keeps the first."""
    better = x > best
    return tl.where(better, x, best), tl.where(better, column, at)


@triton.jit
def first_index(is_highest, index, none, AXIS: tl.constexpr):
    """Return the lowest index among the maxima, which breaks ties as torch does."""
    return tl.min(tl.where(is_highest, index, none), AXIS)


@triton.jit
def store_winner(best, at, values, indices, out, width):
    """Store the maximum over all lanes and the first column that has it."""
    peak = tl.max(best, 0)
    column = first_index(best == peak, at, width, 0)
    tl.store(values + out, peak)
    tl.store(indices + out, column)


@triton.jit
def part_bounds(part, part_width, width):
    """Return the first column of a part, and one past its last."""
    begin = part * part_width
    return begin, tl.minimum(begin + part_width, width)


@triton.jit
def sum_part(logits, begin, end, temperature, LOGIT_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the maximum of a part of a row, and the sum of exp(x - maximum)."""
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        raw = tl.load(logits + column, mask=column < end, other=float("nan"))
        x = scaled(raw, temperature, LOGIT_CAP)
        higher = tl.maximum(peak, x)
        total = total * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
    highest = tl.max(peak, 0)
    return highest, tl.sum(total * tl.exp(peak - highest), 0)


@triton.jit
def merge_parts(peaks, sums, at, live):
    """Return `sum_part` of whole rows, from their parts [ROWS, PARTS]; a sum of 0 for no mass."""
    peak = tl.load(peaks + at, mask=live, other=LOWEST)
    total = tl.load(sums + at, mask=live, other=0.0)
    highest = tl.max(peak, 1)
    return highest, tl.sum(total * tl.exp(peak - highest[:, None]), 1)


def split_rows(rows: int, width: int, block: int) -> tuple[int, int]:
    """Return how many parts each row is split into, and the width of a part."""
    blocks = triton.cdiv(width, block)
    parts = min(blocks, max(1, triton.cdiv(PROGRAMS, rows)))
    part_width = triton.cdiv(blocks, parts) * block
    return triton.cdiv(width, part_width), part_width
