"""Stage 1: propose a block of tokens after each request's anchor."""

from __future__ import annotations

from sglang_dflash.buffers import StepBuffers
from sglang_dflash.config import DFlashConfig
from sglang_dflash.host import Host
from sglang_dflash.kernels import Ops
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.types import DraftContext, Proposal, SamplingPlan


def draft(
    host: Host,
    ops: Ops,
    context: DraftContext,
    plan: SamplingPlan | None,
    *,
    buffers: StepBuffers,
    policy: DraftPolicy,
    config: DFlashConfig,
) -> Proposal:
    """Return the anchor and its drafts, with their positions and KV slots."""
    block = buffers.block(context.anchors.shape[0])
    ops.build_block(
        context.anchors,
        context.lens,
        context.request_rows,
        host.slot_table(),
        mask_token_id=config.mask_token_id,
        last_position=config.context_len - 1,
        token_ids=block.token_ids,
        positions=block.positions,
        slots=block.slots,
    )
    randomness = buffers.randomness.draw(plan)
    output = host.draft_tokens(context, block, randomness)
    if randomness is None:
        block.token_ids[:, 1:] = output.argmax_drafts
        return Proposal(block)
    drafts = policy.select(context.request_rows, output, randomness)
    block.token_ids[:, 1:] = drafts.verified
    return Proposal(block, drafts)
