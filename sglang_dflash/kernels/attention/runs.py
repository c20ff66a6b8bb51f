"""Work split of verify attention: the runs of keys that its programs take.

Lengths and verify widths live on the device, so the grid cannot depend on them. The prefixes of the
batch are split into runs of equal length, at least `min_run` keys and long enough that about
`ctas_per_sm` programs per SM cover the batch, whatever its mix of lengths. Each program finds its
request and keys from `kv_indptr`. With runs of at least `total / goal` keys, n requests have at
most n + goal - 1 runs. Only the runs of split requests need scratch, at most 2 * goal of them. The
grid has a program for every run of full blocks with as many rows; a batch of more, narrower
requests has more runs than that, which `goal` programs, one wave, then take in turn.

In graphs of several blocks, requests of few rows have a launch of their own, except in a small
batch that also has others: there one launch for all is faster than two.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from sglang_dflash.kernels.attention.tiles import SPLIT_REQUESTS

_SPLIT_REQUESTS = tl.constexpr(SPLIT_REQUESTS)


# fmt: off
@triton.jit
def count_runs(
    row_indptr, kv_indptr, num_requests, goal, min_run, few_rows,
    IS_NARROW: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    # fmt: on
    """Return the number of runs of each request [BLOCK_REQUESTS], and the number of keys per run.

    A request that another launch serves has no run; up to `few_rows` rows are few.
    """
    ids = tl.arange(0, BLOCK_REQUESTS)
    live = ids < num_requests
    keys = _lengths(kv_indptr, ids, live)
    if WINDOW >= 0:
        keys = tl.minimum(keys, WINDOW)
    rows = _lengths(row_indptr, ids, live)
    is_large = tl.sum((rows > 0).to(tl.int32), 0) >= _SPLIT_REQUESTS
    is_split = is_large | (tl.max(rows, 0) <= few_rows)
    is_narrow = (rows <= few_rows) & is_split
    is_ours = (rows > 0) & (is_narrow if IS_NARROW else ~is_narrow)
    keys = tl.where(is_ours, keys, 0)
    size = tl.maximum(tl.cdiv(tl.sum(keys, 0), goal), min_run)
    size = tl.cdiv(size, BLOCK_N) * BLOCK_N
    return tl.where(is_ours, tl.maximum(tl.cdiv(keys, size), 1), 0), size


@triton.jit
def _lengths(indptr, ids, live):
    first = tl.load(indptr + ids, mask=live, other=0)
    return (tl.load(indptr + ids + 1, mask=live, other=0) - first).to(tl.int32)
