"""The slots of every prefix of a batch, concatenated for the verify kernel.

No length is read on the host: each program sums the lengths of the requests before its own, and the
grid depends only on the number of requests. Under a sliding window only the last `window` slots of
each prefix are written; `slot_map` then maps slots of the table to slots of the sliding-window
pool.

Layout contract: slot_table [rows, width] with unit column stride; request_rows and lens [n]
contiguous; kv_indptr [n + 1] and kv_indices large enough for every prefix.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
# programs per prefix; each takes every PARTS-th chunk of BLOCK slots
PARTS = 32


# fmt: off
@triton.jit(do_not_specialize=["num_requests"])
def _index_prefixes(
    slot_table, request_rows, lens, kv_indptr, kv_indices, starts, slot_map, slot_stride,
    num_requests,
    WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_MAP: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REQUESTS: tl.constexpr,
):
    # fmt: on
    request = tl.program_id(0)
    part = tl.program_id(1)
    ids = tl.arange(0, BLOCK_REQUESTS)
    before = tl.load(lens + ids, mask=ids < request, other=0).to(tl.int64)
    length = tl.load(lens + request).to(tl.int64)
    keys = length
    if WINDOW >= 0:
        before = tl.minimum(before, WINDOW)
        keys = tl.minimum(length, WINDOW)
    offset = tl.sum(before, 0)
    if part == 0:
        tl.store(kv_indptr + request + 1, offset + keys)
        if request == 0:
            tl.store(kv_indptr, offset)
        if HAS_STARTS:
            tl.store(starts + request, length - keys)
    row = tl.load(request_rows + request).to(tl.int64)
    source = slot_table + row * slot_stride + (length - keys)
    for start in range(part * BLOCK, keys, PARTS * BLOCK):
        n = start + tl.arange(0, BLOCK)
        slot = tl.load(source + n, mask=n < keys, other=0).to(tl.int64)
        if HAS_MAP:
            slot = tl.load(slot_map + slot, mask=n < keys, other=0).to(tl.int64)
        tl.store(kv_indices + offset + n, slot, mask=n < keys)


def index_prefixes(
    slot_table: Tensor,
    request_rows: Tensor,
    lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    window: int = -1,
    starts: Tensor | None = None,
    slot_map: Tensor | None = None,
) -> None:
    """Triton version of `reference.index_prefixes`."""
    requests = request_rows.shape[0]
    _index_prefixes[(requests, PARTS)](
        *(slot_table, request_rows, lens, kv_indptr, kv_indices, starts, slot_map),
        *(slot_table.stride(0), requests),
        WINDOW=window,
        HAS_STARTS=starts is not None,
        HAS_MAP=slot_map is not None,
        PARTS=PARTS,
        BLOCK=BLOCK,
        BLOCK_REQUESTS=triton.next_power_of_2(requests),
    )
