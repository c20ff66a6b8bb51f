"""The second kernel of verify attention: merge the partial results of split requests.

Each row finds its request in `row_indptr`. The runs of a request are combined by their log-sum-exp.
A request that was not split has its rows already, and rows of no request are padding: zeros.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.kernels import pdl
from sglang_dflash.kernels.extents import padded

# programs at large batch sizes: 16 per SM of an H200
PROGRAMS = 2112


# fmt: off
@triton.jit(do_not_specialize=["num_requests", "heads_per_program"])
def _merge_runs(
    partial_out, partial_lse, plan, row_indptr, out, out_stride, num_requests, heads_per_program,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_RUNS: tl.constexpr, BLOCK_REQUESTS: tl.constexpr,
    PDL: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(1).to(tl.int64)
    ids = tl.arange(0, BLOCK_REQUESTS)
    row_ends = tl.load(row_indptr + 1 + ids, mask=ids < num_requests, other=1 << 30)
    request = tl.sum((row_ends <= row).to(tl.int32), 0)
    is_padding = request >= num_requests
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    entry, count, capacity = 0, 0, 0
    if not is_padding:
        entry = tl.load(plan + request * 3)
        count = tl.load(plan + request * 3 + 1)
        capacity = tl.load(plan + request * 3 + 2)
    dv = tl.arange(0, BLOCK_DV)
    heads = KV_HEADS * GROUP
    first = tl.program_id(0) * heads_per_program
    last = tl.minimum(first + heads_per_program, heads)
    out_at = out + row * out_stride + dv
    if is_padding:
        for head in range(first, last):
            tl.store(out_at + head * DV, tl.zeros([BLOCK_DV], out.dtype.element_ty), mask=dv < DV)
    if count > 1:
        of_request = row - tl.load(row_indptr + request)
        for head in range(first, last):
            packed = head // GROUP * (GROUP * capacity) + of_request * GROUP + head % GROUP
            acc = tl.zeros([BLOCK_DV], tl.float32)
            total = 0.0
            peak = float("-inf")
            for start in range(0, count, BLOCK_RUNS):
                run = start + tl.arange(0, BLOCK_RUNS)
                at = entry + run.to(tl.int64) * (heads * capacity) + packed
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
            tl.store(out_at + head * DV, (acc / total).to(out.dtype.element_ty), mask=dv < DV)


def merge_runs(
    partial_out: Tensor,
    partial_lse: Tensor,
    plan: Tensor,
    row_indptr: Tensor,
    out: Tensor,  # [R, heads, dv], written
    *,
    kv_heads: int,
) -> None:
    """Write the rows of split requests, and zeros for padding."""
    rows, heads, value_dim = out.shape
    requests = row_indptr.shape[0] - 1
    # one program per row and head if rows are few; fewer where most requests are not split
    per_program = max(1, rows * heads // PROGRAMS)
    _merge_runs[(triton.cdiv(heads, per_program), rows)](
        *(partial_out, partial_lse, plan, row_indptr),
        *(out, out.stride(0), requests, per_program),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DV=value_dim,
        BLOCK_DV=padded(value_dim),
        BLOCK_RUNS=16,
        BLOCK_REQUESTS=padded(requests),
        **pdl.launch_options(out.device.type),
    )
