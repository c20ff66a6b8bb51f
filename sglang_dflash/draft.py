"""Stage 1: propose a block of tokens after each request's anchor."""

from __future__ import annotations

from sglang_dflash.buffers import StepBuffers
from sglang_dflash.config import DFlashConfig
from sglang_dflash.host import Host
from sglang_dflash.kernels import Ops
from sglang_dflash.types import DraftBlock, DraftContext


def draft(
    host: Host, ops: Ops, context: DraftContext, *, buffers: StepBuffers, config: DFlashConfig
) -> DraftBlock:
    """Return the anchor and its drafts, with their positions and KV slots."""
    block = buffers.block(context.anchors.shape[0])
    ops.build_block(
        context.anchors,
        context.lens,
        context.rows,
        host.slot_table(),
        mask_token_id=config.mask_token_id,
        last_position=config.context_len - 1,
        token_ids=block.token_ids,
        positions=block.positions,
        slots=block.slots,
    )
    block.token_ids[:, 1:] = host.draft_tokens(context, block)
    return block
