"""Block building in torch: the specification, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor


def build_block(
    anchors: Tensor,  # [b] int64
    lens: Tensor,  # [b] int64
    request_rows: Tensor,  # [b] int64
    slot_table: Tensor,  # [rows, width] int
    *,
    mask_token_id: int,
    last_position: int,
    token_ids: Tensor,  # [b, B] int64, written
    positions: Tensor,  # [b, B] int64, written
    slots: Tensor,  # [b, B] int64, written
) -> None:
    """Fill a block with the anchor and B - 1 mask tokens, at positions and slots from `lens` on.

    Positions are clamped to `last_position`: rows past the context length are never committed, but
    their positions must stay inside every RoPE table.
    """
    offsets = torch.arange(token_ids.shape[1], device=lens.device)
    token_ids.fill_(mask_token_id)
    token_ids[:, 0] = anchors
    columns = lens[:, None] + offsets
    slots.copy_(slot_table[request_rows[:, None], columns])
    torch.clamp(columns, max=last_position, out=positions)
