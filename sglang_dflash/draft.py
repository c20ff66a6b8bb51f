"""Stage 1: propose a block of tokens after each request's anchor."""

from __future__ import annotations

import torch

from sglang_dflash.buffers import StepBuffers
from sglang_dflash.config import DFlashConfig
from sglang_dflash.host import Host
from sglang_dflash.kernels import Ops
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.types import DraftBlock, DraftContext, DraftOutput, Proposal, SamplingPlan


def draft(
    host: Host,
    ops: Ops,
    context: DraftContext,
    plan: SamplingPlan | None,
    *,
    width: int,
    buffers: StepBuffers,
    policy: DraftPolicy,
    config: DFlashConfig,
) -> Proposal:
    """Return the anchor and its first `width - 1` drafts, with their positions and KV slots.

    The drafter always sees the full block it was trained on. With a width of 1 it does not run.
    """
    requests = context.anchors.shape[0]

    def build(block: DraftBlock) -> DraftBlock:
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
        return block

    block = build(buffers.verified.block(requests, width))
    host.plan_verify(block)
    randomness = buffers.randomness.draw(plan)
    if width == 1:
        none = torch.empty(requests, 0, dtype=torch.int64, device=context.anchors.device)
        output = DraftOutput(none, none)
    else:
        masked = block
        if width < config.block_size:
            masked = build(buffers.drafted.block(requests, config.block_size))
        output = host.draft_tokens(context, masked, randomness, wanted=width - 1)
        output = output.first(width - 1)
    if randomness is None:
        block.token_ids[:, 1:] = output.argmax_drafts
        return Proposal(block)
    drafts = policy.select(context.request_rows, output, randomness)
    block.token_ids[:, 1:] = drafts.verified
    return Proposal(block, drafts)
