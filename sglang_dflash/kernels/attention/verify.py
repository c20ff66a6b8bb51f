"""Verify attention: every block row over its request's prefix and its own block.

Fusion. One program reads a run of prefix keys and values once for all query heads of a KV head and
all rows of the block (`group * B` packed rows, in tiles of `block_m`, the value dim split into
`dv_parts`), applies scale, logit cap, window and online softmax and, in a request's last run,
attends causally over the block's own keys. As in flash decoding, requests split into several runs
write partial results with their log-sum-exp, which a second kernel merges.

Work split. Lengths live on the device, so the grid cannot depend on them. The prefixes of the batch
are split into runs of equal length, at least `min_run` keys and long enough that about
`ctas_per_sm` programs per SM cover the batch, whatever its mix of lengths. Each program finds its
request and keys from `kv_indptr`. With runs of at least `total / goal` keys, n requests have at
most n + goal - 1 runs. Only the runs of split requests need scratch, at most 2 * goal of them.

Layout contract. n requests of B consecutive rows; the query heads of a KV head are adjacent. query
[n * B, heads, d] and out [n * B, heads, dv], caches [slots, kv_heads, d] and [slots, kv_heads, dv]:
dense except for the row or slot stride, as are block keys [n * B, kv_heads, d] and values
[n * B, kv_heads, dv]. With `slots` the block's KV is also written to the caches, by the program
that has just read it. kv_indptr [n + 1] int32 and kv_indices hold the slots of each prefix,
excluding the block; a prefix may be empty. Under a sliding window, keys that no row can see may be
missing from the front: positions are counted back from the end of the prefix.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.kernels import pdl
from sglang_dflash.kernels.attention.tiles import (
    TILE_FP32,
    TILES,
    LayerShape,
    Tile,
    can_serve,
    count_row_tiles,
    count_value_parts,
    padded,
    tile_dim,
)

LOG2E = tl.constexpr(1.4426950408889634)


# merge programs at large batch sizes: 16 per SM of an H200
MERGE_PROGRAMS = 2112


# fmt: off
@triton.jit
def _find_run(
    kv_indptr, run, num_requests, goal, min_run,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REQUESTS: tl.constexpr,
):
    # fmt: on
    """Return (request, run index within it, its run count, its first scratch row, keys per run).

    The request is `num_requests` or more if the batch has no run for this program.
    """
    ids = tl.arange(0, BLOCK_REQUESTS)
    live = ids < num_requests
    first = tl.load(kv_indptr + ids, mask=live, other=0)
    keys = tl.load(kv_indptr + ids + 1, mask=live, other=0) - first
    if WINDOW >= 0:
        keys = tl.minimum(keys, WINDOW)
    size = tl.maximum(tl.cdiv(tl.sum(keys, 0), goal), min_run)
    size = tl.cdiv(size, BLOCK_N) * BLOCK_N
    runs = tl.where(live, tl.maximum(tl.cdiv(keys, size), 1), 0)
    request = tl.sum((tl.cumsum(runs, 0) <= run).to(tl.int32), 0)
    index = run - tl.sum(tl.where(ids < request, runs, 0), 0)
    count = tl.sum(tl.where(ids == request, runs, 0), 0)
    scratch = tl.sum(tl.where((ids < request) & (runs > 1), runs, 0), 0)
    return request, index, count, scratch, size


@triton.jit
def _score(query, keys, n, end, oldest, scale, WINDOW: tl.constexpr, LOGIT_CAP: tl.constexpr):
    """Return base-2 scores: -inf outside [oldest, end); oldest applies only under a window."""
    # ieee: no tf32 for fp32 inputs; no effect on narrower types
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
    if LOGIT_CAP > 0:
        # tanh via sigmoid, which saturates without overflow
        scores = 2.0 * tl.sigmoid(scores * (scale * 2.0 / LOGIT_CAP)) - 1.0
        scores *= LOGIT_CAP * LOG2E
    else:
        scores *= scale * LOG2E
    visible = n[None, :] < end
    if WINDOW >= 0:
        visible = visible & (n[None, :] >= oldest[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _fold(acc, peak, total, scores, values):
    """Update the online softmax with one tile of keys."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # for a row that has seen no key yet, -inf minus -inf would be NaN
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total


# fmt: off
@triton.jit(do_not_specialize=["num_requests", "goal", "min_run"])
def _attend_runs(
    query, block_keys, block_values, out, key_cache, value_cache, kv_indptr, kv_indices,
    partial_out,  # [scratch rows, kv_heads, group * B, dv] fp32
    partial_lse,  # [scratch rows, kv_heads, group * B] fp32, base 2
    plan,  # [n, 2] int32, first scratch row and run count of each request
    slots_out,  # [n * B] int64
    scale, key_scale, value_scale, num_requests, goal, min_run,
    query_stride, out_stride, key_stride, value_stride, block_key_stride, block_value_stride,
    WRITES: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, LOGIT_CAP: tl.constexpr,
    TILES_M: tl.constexpr, DV_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    # ordered for reuse: parts and tiles of the same keys first, then heads of the same slots
    part = tl.program_id(0) % DV_PARTS
    tile = tl.program_id(0) // DV_PARTS % TILES_M
    head = (tl.program_id(0) // (DV_PARTS * TILES_M)).to(tl.int64)
    request, index, count, scratch, size = _find_run(
        kv_indptr, tl.program_id(1), num_requests, goal, min_run, WINDOW, BLOCK_N, BLOCK_REQUESTS
    )
    if request >= num_requests:
        return

    prefix_end = tl.load(kv_indptr + request + 1)
    prefix = prefix_end - tl.load(kv_indptr + request)
    if WINDOW >= 0:
        prefix = tl.minimum(prefix, WINDOW)
    begin = index * size
    end = tl.minimum(begin + size, prefix)

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // GROUP
    d = tl.arange(0, BLOCK_D)[None, :]
    dv = part * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    packed_live = (packed < GROUP * ROWS)[:, None]
    first_row = request.to(tl.int64) * ROWS
    query_head = head * GROUP + packed % GROUP
    query_at = (first_row + row) * query_stride + query_head * D
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    keys_at = key_cache + head * D + d
    values_at = value_cache + head * DV + dv
    slots_at = kv_indices + (prefix_end - prefix).to(tl.int64)
    oldest = prefix + row - WINDOW
    # slots are loaded one iteration ahead, so that key and value loads need not wait for them
    n = begin + tl.arange(0, BLOCK_N)
    slots = tl.load(slots_at + n, mask=n < end, other=0).to(tl.int64)
    if PDL:
        # nothing read so far was written by this layer's kernels
        gdc_wait()
        gdc_launch_dependents()
    if (tl.program_id(0) == 0) & (index == 0):
        tl.store(plan + request * 2, scratch)
        tl.store(plan + request * 2 + 1, count)
    q = tl.load(query + query_at[:, None] + d, mask=packed_live & (d < D), other=0.0)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = (n < end)[:, None]
        k = tl.load(keys_at + slots[:, None] * key_stride, mask=live & (d < D), other=0.0)
        v = tl.load(values_at + slots[:, None] * value_stride, mask=live & (dv < DV), other=0.0)
        slots = tl.load(slots_at + n + BLOCK_N, mask=n + BLOCK_N < end, other=0).to(tl.int64)
        scores = _score(q, k, n, end, oldest, scale * key_scale, WINDOW, LOGIT_CAP)
        acc, peak, total = _fold(acc, peak, total, scores, v.to(q.dtype))
    acc *= value_scale

    if index == count - 1:
        column = tl.arange(0, BLOCK_ROWS)
        token = (first_row + column)[:, None]
        live = (column < ROWS)[:, None]
        keys_from = block_keys + token * block_key_stride + head * D + d
        values_from = block_values + token * block_value_stride + head * DV + dv
        k = tl.load(keys_from, mask=live & (d < D), other=0.0)
        v = tl.load(values_from, mask=live & (dv < DV), other=0.0)
        # no race: no program of this launch reads a block's slots; compiled out without slots
        if WRITES:  # noqa: SIM102
            if tile == 0:
                slot = tl.load(slots_out + first_row + column, mask=column < ROWS, other=0)[:, None]
                tl.store(keys_at + slot * key_stride, k, mask=live & (d < D))
                tl.store(values_at + slot * value_stride, v, mask=live & (dv < DV))
        own = _score(q, k, column, row[:, None] + 1, row - WINDOW, scale, WINDOW, LOGIT_CAP)
        acc, peak, total = _fold(acc, peak, total, own, v)

    # a row that sees no key of this run: zeros and an lse of -inf, so that its weight is zero
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    store_live = packed_live & (dv < DV)
    if count == 1:
        out_at = (first_row + row) * out_stride + query_head * DV
        tl.store(out + out_at[:, None] + dv, acc.to(out.dtype.element_ty), mask=store_live)
    else:
        partial_at = ((scratch + index) * KV_HEADS + head) * (GROUP * ROWS) + packed
        tl.store(partial_out + partial_at[:, None] * DV + dv, acc, mask=store_live)
        tl.store(partial_lse + partial_at, peak + tl.log2(total), mask=packed < GROUP * ROWS)


# fmt: off
@triton.jit(do_not_specialize=["rows_per_program"])
def _merge_runs(
    partial_out, partial_lse, plan, out, out_stride, rows_per_program,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_RUNS: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(1).to(tl.int64)
    scratch = tl.load(plan + request * 2)
    count = tl.load(plan + request * 2 + 1)
    if count == 1:
        return
    rows = KV_HEADS * GROUP * ROWS
    dv = tl.arange(0, BLOCK_DV)
    first = tl.program_id(0) * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, rows)):
        acc = tl.zeros([BLOCK_DV], tl.float32)
        total = 0.0
        peak = float("-inf")
        for start in range(0, count, BLOCK_RUNS):
            run = start + tl.arange(0, BLOCK_RUNS)
            at = (scratch + run).to(tl.int64) * rows + row
            lse = tl.load(partial_lse + at, mask=run < count, other=float("-inf"))
            live = (run < count)[:, None] & (dv < DV)[None, :]
            part = tl.load(partial_out + at[:, None] * DV + dv[None, :], mask=live, other=0.0)
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(lse - base)
            shrink = tl.exp2(peak - base)
            acc = acc * shrink + tl.sum(part * weights[:, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            peak = new_peak
        packed = row % (GROUP * ROWS)
        query_head = row // (GROUP * ROWS) * GROUP + packed % GROUP
        out_at = (request * ROWS + packed // GROUP) * out_stride + query_head * DV
        tl.store(out + out_at + dv, (acc / total).to(out.dtype.element_ty), mask=dv < DV)


class VerifyAttention:
    """The kernel with its scratch, for every kind of layer in a model.

    Scratch is shared by all layers, so calls must be ordered on one stream. Calls neither allocate
    nor read tensors on the host, and launches do not depend on lengths: safe under CUDA graphs.
    """

    def __init__(
        self,
        max_requests: int,
        block_size: int,
        *,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str,
        num_sms: int | None = None,  # queried from the device if not given
        tiles: Mapping[int, Tile] | None = None,
    ) -> None:
        self.max_requests = max_requests
        self.block_size = block_size
        self.dtype = dtype
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        if tiles is None:
            tiles = dict.fromkeys(TILES, TILE_FP32) if dtype == torch.float32 else TILES
        assert all(can_serve(s, tiles) for s in shapes), f"no tile for one of {shapes}"
        self.tiles = {s: tiles[tile_dim(s, tiles)] for s in shapes}
        # target runs per batch; each takes a program per KV head, row tile and value part
        self.goals = {}
        for s, tile in self.tiles.items():
            shared = count_row_tiles(s, tile, block_size) * count_value_parts(s, tile)
            programs = s.num_kv_heads * shared
            self.goals[s] = max(1, tile.ctas_per_sm * num_sms // programs)
        rows = {s: 2 * goal * s.num_q_heads * block_size for s, goal in self.goals.items()}
        size = max(rows[s] * s.v_head_dim for s in shapes)
        self.partial_out = torch.empty(size, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(max(rows.values()), dtype=torch.float32, device=device)
        self.plan = torch.empty(max_requests, 2, dtype=torch.int32, device=device)

    def fits(self, query: Tensor, keys: Tensor, values: Tensor, *caches: Tensor) -> bool:
        """Return whether a layer's tensors, each [n, heads, dim], match what this was built for."""
        dense = all(
            x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]
            for x in (query, keys, values, *caches)
        )
        return (
            dense
            and LayerShape(query.shape[1], keys.shape[1], query.shape[2], values.shape[2])
            in self.tiles
            and query.shape[0] <= self.max_requests * self.block_size
            and query.dtype == keys.dtype == values.dtype == self.dtype
            and [x.shape[1:] for x in caches] == [keys.shape[1:], values.shape[1:]]
        )

    def run(
        self,
        query: Tensor,  # [n * B, heads, d]
        block_keys: Tensor,  # [n * B, kv_heads, d]
        block_values: Tensor,  # [n * B, kv_heads, dv]
        out: Tensor,  # [n * B, heads, dv], written
        key_cache: Tensor,  # [slots, kv_heads, d]
        value_cache: Tensor,  # [slots, kv_heads, dv]
        kv_indptr: Tensor,  # [n + 1] int32
        kv_indices: Tensor,  # [keys] int64, slots of the prefixes
        *,
        scale: float,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        window_left: int = -1,
        logit_cap: float = 0.0,
        slots: Tensor | None = None,  # [n * B] int64, slots to also write the block's KV to
    ) -> None:
        """Triton version of `reference.verify_attention`."""
        n = kv_indptr.shape[0] - 1
        rows = query.shape[0] // n
        shape = LayerShape(query.shape[1], block_keys.shape[1], query.shape[2], out.shape[2])
        tile, goal = self.tiles[shape], self.goals[shape]
        tiles_m, parts = count_row_tiles(shape, tile, rows), count_value_parts(shape, tile)
        layout = {
            "KV_HEADS": shape.num_kv_heads,
            "GROUP": shape.num_q_heads // shape.num_kv_heads,
            "ROWS": rows,
            "DV": shape.v_head_dim,
        }
        _attend_runs[(shape.num_kv_heads * tiles_m * parts, n + goal - 1)](
            *(query, block_keys, block_values, out, key_cache, value_cache, kv_indptr, kv_indices),
            *(self.partial_out, self.partial_lse, self.plan),
            *(slots, scale, key_scale, value_scale, n, goal, tile.min_run),
            *(x.stride(0) for x in (query, out, key_cache, value_cache, block_keys, block_values)),
            **layout,
            WRITES=slots is not None,
            D=shape.head_dim,
            WINDOW=window_left,
            LOGIT_CAP=logit_cap,
            TILES_M=tiles_m,
            DV_PARTS=parts,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_ROWS=padded(rows),
            BLOCK_D=padded(shape.head_dim),
            BLOCK_DV=padded(shape.v_head_dim) // parts,
            BLOCK_REQUESTS=padded(n),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **pdl.launch_options(out.device.type),
        )
        # a goal of one run splits no request
        if goal > 1:
            self._merge(out, shape, n, layout)

    def _merge(self, out: Tensor, shape: LayerShape, n: int, layout: dict[str, int]) -> None:
        heads_rows = shape.num_q_heads * layout["ROWS"]
        # one program per row if rows are few; fewer where most requests are not split anyway
        per_program = max(1, n * heads_rows // MERGE_PROGRAMS)
        _merge_runs[(triton.cdiv(heads_rows, per_program), n)](
            *(self.partial_out, self.partial_lse, self.plan, out, out.stride(0), per_program),
            **layout,
            BLOCK_DV=padded(shape.v_head_dim),
            BLOCK_RUNS=16,
            **pdl.launch_options(out.device.type),
        )
