"""The highest probability of each row of logits, in one read in the head's own dtype.

Fusion. The logit cap is applied on the fly in fp32, and each part's maximum and its sum of
exponentials are computed by online softmax: no probabilities are written to memory. A row is split
into parts, which a second kernel merges.

Layout contract: logits [n, V], unit column stride. The number of rows is a runtime value: it may
change from step to step. NaN has no mass.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.extents import aligned
from sglang_dflash.kernels.logits.triton import merge_parts, part_bounds, split_rows, sum_part

BLOCK = 2048
ROWS = 16  # merged by one program


# fmt: off
@triton.jit
def _peak_parts(
    logits, peaks, sums, row_stride, width, part_width,
    LOGIT_CAP: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = part_bounds(part, part_width, width)
    peak, total = sum_part(logits + row * row_stride, begin, end, 1.0, LOGIT_CAP, BLOCK)
    out = row * tl.num_programs(1) + part
    tl.store(peaks + out, peak)
    tl.store(sums + out, total)


# fmt: off
@triton.jit(do_not_specialize=["rows", "parts"])
def _peak_merge(
    peaks, sums, probabilities, rows, parts, ROWS: tl.constexpr, PARTS: tl.constexpr
):
    # fmt: on
    row, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PARTS)
    is_row = row < rows
    live = is_row[:, None] & (part[None, :] < parts)
    _, whole = merge_parts(peaks, sums, row[:, None] * parts + part[None, :], live)
    # the maximum's own exponential is 1
    tl.store(probabilities + row, tl.where(whole > 0, 1.0 / whole, 0.0), mask=is_row)


def peak_probabilities(logits: Tensor, logit_cap: float = 0.0) -> Tensor:
    """Triton version of `reference.peak_probabilities`."""
    rows, width = logits.shape
    parts, part_width = split_rows(rows, width, BLOCK)
    peaks, sums = torch.empty(2, aligned(rows), parts, device=logits.device)
    probabilities = torch.empty(rows, device=logits.device)
    _peak_parts[(rows, parts)](
        *(logits, peaks, sums, logits.stride(0), width, part_width),
        LOGIT_CAP=logit_cap,
        BLOCK=BLOCK,
        num_warps=4,
    )
    _peak_merge[(triton.cdiv(rows, ROWS),)](
        *(peaks, sums, probabilities, rows, parts),
        ROWS=ROWS,
        # room for any number of parts: the number of rows must not change the kernel
        PARTS=triton.next_power_of_2(triton.cdiv(width, BLOCK)),
        num_warps=4,
    )
    return probabilities
