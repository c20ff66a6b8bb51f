"""Block building: one program writes the tokens, positions and slots of one request's block.

Layout contract: anchors, lens and request_rows [b] contiguous; slot_table [rows, width] with
unit column stride; outputs [b, B] contiguous.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.extents import padded


# fmt: off
@triton.jit(do_not_specialize=["width"])
def _build_block(
    anchors, lens, request_rows, slot_table, token_ids, positions, slots,
    slot_stride, mask_token_id, last_position, width,
    BLOCK: tl.constexpr,
):
    # fmt: on
    request = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    live = column < width
    length = tl.load(lens + request).to(tl.int64)
    row = tl.load(request_rows + request).to(tl.int64)
    anchor = tl.load(anchors + request)
    at = request * width + column
    slot = tl.load(slot_table + row * slot_stride + length + column, mask=live, other=0)
    tl.store(token_ids + at, tl.where(column == 0, anchor, mask_token_id), mask=live)
    tl.store(positions + at, tl.minimum(length + column, last_position), mask=live)
    tl.store(slots + at, slot.to(tl.int64), mask=live)


def build_block(
    anchors: Tensor,
    lens: Tensor,
    request_rows: Tensor,
    slot_table: Tensor,
    *,
    mask_token_id: int,
    last_position: int,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Triton version of `reference.build_block`."""
    requests, width = token_ids.shape
    _build_block[(requests,)](
        *(anchors, lens, request_rows, slot_table, token_ids, positions, slots),
        *(slot_table.stride(0), mask_token_id, last_position, width),
        BLOCK=padded(width),
        num_warps=1,
    )
