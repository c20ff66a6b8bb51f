"""Verify attention: every row of a block over its request's prefix and its own block.

Fusion. One program reads a run of prefix keys and values once for all query heads of a KV head and
all rows of the block (`group * B` packed rows, in tiles of `block_m`, the value dim split into
`dv_parts`), applies scale, logit cap, window and online softmax and, in a request's last run,
attends causally over the block's own keys. As in flash decoding, requests split into several runs
write partial results with their log-sum-exp, which a second kernel merges. An attention sink, a
logit of its own for each query head, is one more term of the softmax denominator, with no value: a
request's last run starts from it, so that it counts once however many runs there are.

Work split. See `runs.py`. With programmatic dependent launch the two launches overlap: the second
starts once every program of the first has waited for the kernels before it. So it need not wait for
them, but must wait for the first launch before it ends.

Layout contract. n requests, each of 0 to B consecutive rows of the R rows, as `row_indptr` [n + 1]
says; rows after the last request's are padding, for which zeros are written. The query heads of a
KV head are adjacent. query [R, heads, d] and out [R, heads, dv], caches [slots, kv_heads, d] and
[slots, kv_heads, dv]: dense except for the row or slot stride, as are block keys [R, kv_heads, d]
and values [R, kv_heads, dv]. With `slots` the block's KV is also written to the caches, by the
program that has just read it. kv_indptr [n + 1] int32 and kv_indices hold the slots of each prefix,
excluding the block; a prefix may be empty. Under a sliding window, keys that no row can see may be
missing from the front: positions are counted back from the end of the prefix.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.kernels import cards, pdl
from sglang_dflash.kernels.attention.merge import merge_runs
from sglang_dflash.kernels.attention.runs import count_runs
from sglang_dflash.kernels.attention.tiles import (
    LayerShape,
    Tile,
    can_serve,
    choose_tiles,
    count_row_tiles,
    count_value_parts,
    tile_dim,
)
from sglang_dflash.kernels.extents import padded

LOG2E = tl.constexpr(1.4426950408889634)


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
def _start(sinks, query_head, counts, HAS_SINKS: tl.constexpr):
    """Return peak and total of a softmax over no key: of the sink alone where it counts."""
    peak = tl.full(counts.shape, float("-inf"), tl.float32)
    total = tl.zeros(counts.shape, tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + query_head, mask=counts, other=float("-inf"))
        peak = peak.to(tl.float32) * LOG2E
        total = counts.to(tl.float32)
    return peak, total


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
@triton.jit(do_not_specialize=["num_requests", "goal", "min_run", "few_rows", "first_entry"])
def _attend_runs(
    query, block_keys, block_values, out, key_cache, value_cache,
    row_indptr, kv_indptr, kv_indices,
    partial_out,  # [entries, dv] fp32; from `first_entry` on, [runs, kv_heads, group * ROWS]
    partial_lse,  # [entries] fp32, base 2
    plan,  # [n, 3] int32: first entry of each request, its number of runs, and ROWS
    slots_out, sinks,  # [R] int64, [heads]
    scale, key_scale, value_scale, num_requests, goal, min_run, few_rows, first_entry,
    query_stride, out_stride, key_stride, value_stride, block_key_stride, block_value_stride,
    WRITES: tl.constexpr, HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, LOGIT_CAP: tl.constexpr,
    TILES_M: tl.constexpr, DV_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr, IS_NARROW: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    # ordered for reuse: parts and tiles of the same keys first, then heads of the same slots
    part = tl.program_id(0) % DV_PARTS
    tile = tl.program_id(0) // DV_PARTS % TILES_M
    head = (tl.program_id(0) // (DV_PARTS * TILES_M)).to(tl.int64)
    runs, size = count_runs(
        row_indptr, kv_indptr, num_requests, goal, min_run, few_rows,
        IS_NARROW, WINDOW, BLOCK_N, BLOCK_REQUESTS,
    )
    ids = tl.arange(0, BLOCK_REQUESTS)
    ends = tl.cumsum(runs, 0)
    if PDL:
        if not IS_NARROW:
            # nothing read so far was written by this layer's kernels
            gdc_wait()
        gdc_launch_dependents()
    # more runs than programs: one wave of programs takes them all, so that none waits for an SM
    num_runs = tl.sum(runs, 0)
    stride = tl.where(num_runs > tl.num_programs(1), goal, tl.num_programs(1))
    end_run = tl.where(tl.program_id(1) < stride, num_runs, 0)
    for run in range(tl.program_id(1), end_run, stride):
        request = tl.sum((ends <= run).to(tl.int32), 0)
        before = ids < request
        index = run - tl.sum(tl.where(before, runs, 0), 0)
        count = tl.sum(tl.where(ids == request, runs, 0), 0)
        split_before = tl.sum(tl.where(before & (runs > 1), runs, 0), 0)
        entry = first_entry + split_before * (KV_HEADS * GROUP * ROWS)
        first_row = tl.load(row_indptr + request).to(tl.int64)
        rows = (tl.load(row_indptr + request + 1) - first_row).to(tl.int32)
        prefix_end = tl.load(kv_indptr + request + 1)
        prefix = prefix_end - tl.load(kv_indptr + request)
        if WINDOW >= 0:
            prefix = tl.minimum(prefix, WINDOW)
        if (tl.program_id(0) == 0) & (index == 0):
            tl.store(plan + request * 3, entry)
            tl.store(plan + request * 3 + 1, count)
            tl.store(plan + request * 3 + 2, ROWS)
        begin = index * size
        end = tl.minimum(begin + size, prefix)
        # a narrow request leaves the last tiles without a row
        if tile * BLOCK_M < GROUP * rows:
            packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            row = packed // GROUP
            d = tl.arange(0, BLOCK_D)[None, :]
            dv = part * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
            packed_live = packed < GROUP * rows
            query_head = head * GROUP + packed % GROUP
            query_at = (first_row + row) * query_stride + query_head * D
            acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            is_last = index == count - 1
            peak, total = _start(sinks, query_head, packed_live & is_last, HAS_SINKS)
            keys_at = key_cache + head * D + d
            values_at = value_cache + head * DV + dv
            slots_at = kv_indices + (prefix_end - prefix).to(tl.int64)
            oldest = prefix + row - WINDOW
            # slots are loaded one iteration ahead, so that key and value loads need not wait
            n = begin + tl.arange(0, BLOCK_N)
            slots = tl.load(slots_at + n, mask=n < end, other=0).to(tl.int64)
            q_live = packed_live[:, None] & (d < D)
            q = tl.load(query + query_at[:, None] + d, mask=q_live, other=0.0)
            for start in range(begin, end, BLOCK_N):
                n = start + tl.arange(0, BLOCK_N)
                live = (n < end)[:, None]
                k = tl.load(keys_at + slots[:, None] * key_stride, mask=live & (d < D), other=0.0)
                v = tl.load(
                    values_at + slots[:, None] * value_stride, mask=live & (dv < DV), other=0.0
                )
                slots = tl.load(slots_at + n + BLOCK_N, mask=n + BLOCK_N < end, other=0)
                slots = slots.to(tl.int64)
                scores = _score(q, k, n, end, oldest, scale * key_scale, WINDOW, LOGIT_CAP)
                acc, peak, total = _fold(acc, peak, total, scores, v.to(q.dtype))
            acc *= value_scale

            if is_last:
                column = tl.arange(0, BLOCK_ROWS)
                token = (first_row + column)[:, None]
                live = (column < rows)[:, None]
                keys_from = block_keys + token * block_key_stride + head * D + d
                values_from = block_values + token * block_value_stride + head * DV + dv
                k = tl.load(keys_from, mask=live & (d < D), other=0.0)
                v = tl.load(values_from, mask=live & (dv < DV), other=0.0)
                # compiled out without slots. No race: no program of this launch reads a block's
                if WRITES:  # noqa: SIM102
                    if tile == 0:
                        slot = tl.load(slots_out + first_row + column, mask=column < rows, other=0)
                        slot = slot[:, None]
                        tl.store(keys_at + slot * key_stride, k, mask=live & (d < D))
                        tl.store(values_at + slot * value_stride, v, mask=live & (dv < DV))
                own = _score(q, k, column, row[:, None] + 1, row - WINDOW, scale, WINDOW, LOGIT_CAP)
                acc, peak, total = _fold(acc, peak, total, own, v)

            # a row that sees no key of this run: zeros and an lse of -inf, so its weight is zero
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            store_live = packed_live[:, None] & (dv < DV)
            if count == 1:
                out_at = (first_row + row) * out_stride + query_head * DV
                tl.store(out + out_at[:, None] + dv, acc.to(out.dtype.element_ty), mask=store_live)
            else:
                partial_at = entry + (index * KV_HEADS + head) * (GROUP * ROWS) + packed
                tl.store(partial_out + partial_at[:, None] * DV + dv, acc, mask=store_live)
                tl.store(partial_lse + partial_at, peak + tl.log2(total), mask=packed_live)
    if PDL and IS_NARROW:
        gdc_wait()


class Launch(NamedTuple):
    """One launch of the kernel: for requests of up to `rows` rows."""

    tile: Tile
    rows: int
    goal: int  # runs per batch; each takes a program per KV head, row tile and value part
    entries: int  # of scratch, at most


class VerifyAttention:
    """The kernel with its scratch, for every kind of layer in a model.

    Requests of few rows have a launch of their own, with smaller tiles, of which more are resident:
    a tile of 64 rows for two would keep too few loads in flight. A single block has one launch.

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
        tiles: Mapping[int, Tile] | None = None,  # this card's if not given, as are the narrow
        narrow_tiles: Mapping[int, Tile] | None = None,  # empty if all requests have full blocks
    ) -> None:
        self.max_requests = max_requests
        self.block_size = block_size
        self.dtype = dtype
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        chosen = choose_tiles(cards.current(), dtype)
        tiles = chosen.wide if tiles is None else tiles
        narrow_tiles = chosen.narrow if narrow_tiles is None else narrow_tiles
        assert all(can_serve(s, tiles) for s in shapes), f"no tile for one of {shapes}"

        def plan_launch(shape: LayerShape, tile: Tile, rows: int) -> Launch:
            programs = count_row_tiles(shape, tile, rows) * count_value_parts(shape, tile)
            goal = max(1, tile.ctas_per_sm * num_sms // (shape.num_kv_heads * programs))
            return Launch(tile, rows, goal, 2 * goal * shape.num_q_heads * rows)

        self.wide, self.narrow = {}, {}
        for shape in shapes:
            self.wide[shape] = plan_launch(shape, tiles[tile_dim(shape)], block_size)
            tile = narrow_tiles.get(tile_dim(shape))
            rows = 0 if tile is None else tile.block_m * shape.num_kv_heads // shape.num_q_heads
            if tile is not None and 0 < rows < block_size:
                self.narrow[shape] = plan_launch(shape, tile, rows)
        entries = {s: wide.entries for s, wide in self.wide.items()}
        for shape, narrow in self.narrow.items():
            entries[shape] += narrow.entries
        size = max(entries[s] * s.v_head_dim for s in shapes)
        self.partial_out = torch.empty(size, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(max(entries.values()), dtype=torch.float32, device=device)
        self.plan = torch.empty(max_requests, 3, dtype=torch.int32, device=device)

    def fits(self, query: Tensor, keys: Tensor, values: Tensor, *caches: Tensor) -> bool:
        """Return whether a layer's tensors, each [n, heads, dim], match what this was built for."""
        dense = all(
            x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]
            for x in (query, keys, values, *caches)
        )
        return (
            dense
            and LayerShape(query.shape[1], keys.shape[1], query.shape[2], values.shape[2])
            in self.wide
            and query.shape[0] <= self.max_requests * self.block_size
            and query.dtype == keys.dtype == values.dtype == self.dtype
            and [x.shape[1:] for x in caches] == [keys.shape[1:], values.shape[1:]]
        )

    def run(
        self,
        query: Tensor,  # [R, heads, d]
        block_keys: Tensor,  # [R, kv_heads, d]
        block_values: Tensor,  # [R, kv_heads, dv]
        out: Tensor,  # [R, heads, dv], written
        key_cache: Tensor,  # [slots, kv_heads, d]
        value_cache: Tensor,  # [slots, kv_heads, dv]
        row_indptr: Tensor,  # [n + 1] int, rows of each request
        kv_indptr: Tensor,  # [n + 1] int32
        kv_indices: Tensor,  # [keys] int64, slots of the prefixes
        *,
        scale: float,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        window_left: int = -1,
        logit_cap: float = 0.0,
        slots: Tensor | None = None,  # [R] int64, slots to also write the block's KV to
        sinks: Tensor | None = None,  # [heads] a logit each, added to the softmax denominator
    ) -> None:
        """Triton version of `reference.verify_attention`."""
        shape = LayerShape(query.shape[1], block_keys.shape[1], query.shape[2], out.shape[2])
        wide, narrow = self.wide[shape], self.narrow.get(shape)
        rows = (query, block_keys, block_values, out)
        tensors = (*rows, key_cache, value_cache, row_indptr, kv_indptr, kv_indices)
        options = {"WINDOW": window_left, "LOGIT_CAP": logit_cap}
        scales = (scale, key_scale, value_scale)
        extras = (slots, sinks)
        blocks = triton.cdiv(query.shape[0], self.block_size)
        if blocks == 1 or narrow is None:
            self._launch(wide, blocks + wide.goal - 1, shape, tensors, extras, scales, options)
        else:
            programs = blocks + wide.goal - 1
            few = narrow.rows
            self._launch(wide, programs, shape, tensors, extras, scales, options, few_rows=few)
            self._launch(
                *(narrow, narrow.goal, shape, tensors, extras, scales, options),
                few_rows=few,
                first_entry=wide.entries,
                is_narrow=True,
            )
        merge_runs(
            *(self.partial_out, self.partial_lse, self.plan),
            row_indptr,
            out,
            kv_heads=shape.num_kv_heads,
        )

    def _launch(
        self,
        launch: Launch,
        programs: int,
        shape: LayerShape,
        tensors: tuple[Tensor, ...],
        extras: tuple[Tensor | None, Tensor | None],  # slots and sinks
        scales: tuple[float, float, float],
        options: dict[str, Any],
        *,
        few_rows: int = 0,
        first_entry: int = 0,
        is_narrow: bool = False,
    ) -> None:
        query, block_keys, block_values, out, key_cache, value_cache, _, kv_indptr, _ = tensors
        n = kv_indptr.shape[0] - 1
        tile = launch.tile
        tiles_m, parts = count_row_tiles(shape, tile, launch.rows), count_value_parts(shape, tile)
        _attend_runs[(shape.num_kv_heads * tiles_m * parts, programs)](
            *(*tensors, self.partial_out, self.partial_lse, self.plan),
            *(*extras, *scales, n, launch.goal, tile.min_run, few_rows, first_entry),
            *(x.stride(0) for x in (query, out, key_cache, value_cache, block_keys, block_values)),
            **options,
            WRITES=extras[0] is not None,
            HAS_SINKS=extras[1] is not None,
            KV_HEADS=shape.num_kv_heads,
            GROUP=shape.num_q_heads // shape.num_kv_heads,
            ROWS=launch.rows,
            D=shape.head_dim,
            DV=shape.v_head_dim,
            TILES_M=tiles_m,
            DV_PARTS=parts,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_ROWS=padded(launch.rows),
            BLOCK_D=padded(shape.head_dim),
            BLOCK_DV=padded(shape.v_head_dim) // parts,
            BLOCK_REQUESTS=padded(n),
            IS_NARROW=is_narrow,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **pdl.launch_options(out.device.type),
        )
