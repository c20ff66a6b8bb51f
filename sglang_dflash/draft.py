"""Stage 1: propose a block of tokens after each request's anchor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dflash.buffers import StepBuffers
from sglang_dflash.config import DFlashConfig
from sglang_dflash.host import Host
from sglang_dflash.kernels import Ops
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.types import (
    DraftBlock,
    DraftContext,
    Proposal,
    Randomness,
    RowShare,
    SampledDrafts,
    SamplingPlan,
)


def draft(
    host: Host,
    ops: Ops,
    context: DraftContext,
    plan: SamplingPlan | None,
    *,
    width: int,
    share: RowShare | None,
    confidence: NDArray[np.float32] | None,
    buffers: StepBuffers,
    policy: DraftPolicy,
    config: DFlashConfig,
) -> Proposal:
    """Return the anchor and its first `width - 1` drafts, with their positions and KV slots, and
    which of them to verify if rows are shared. For benchmarks, `confidence` [b, B - 1] replaces the
    drafter's.

    The drafter always sees the full block it was trained on. With a width of 1 it does not run.
    """
    if width == 1:
        randomness = buffers.randomness.draw(plan)
        return propose_anchors(host, ops, context, randomness, buffers=buffers, config=config)
    requests = context.anchors.shape[0]
    build = partial(_build, host, ops, context, config)
    block = build(buffers.verified.block(requests, width))
    if share is None:
        host.plan_verify(block)
    randomness = buffers.randomness.draw(plan)
    masked = block
    if width < config.block_size:
        masked = build(buffers.drafted.block(requests, config.block_size))
    output = host.draft_tokens(
        context, masked, randomness, wanted=width - 1, with_confidence=share is not None
    )
    output = output.first(width - 1)
    drafts = None
    if randomness is not None:
        drafts = policy.select(context.request_rows, output, randomness)
        host.agree(drafts.verified)
    block.token_ids[:, 1:] = output.argmax_drafts if drafts is None else drafts.verified
    if share is None:
        return Proposal(block, drafts)
    sure = output.confidence
    if confidence is not None:
        sure = torch.from_numpy(confidence[:, : width - 1]).to(
            block.slots.device, non_blocking=True
        )
    assert sure is not None, "the drafter returned no confidence"
    bounds = ops.share_rows(sure, share.offsets, share.slopes, share.num_rows)
    host.agree(bounds)
    return Proposal(pack_rows(ops, block, bounds, share.num_rows, buffers), drafts, sure)


def propose_anchors(
    host: Host,
    ops: Ops,
    context: DraftContext,
    randomness: Randomness | None,
    *,
    buffers: StepBuffers,
    config: DFlashConfig,
) -> Proposal:
    """Return the anchors without drafts, with which to sample the token after them."""
    block = buffers.verified.block(context.anchors.shape[0], 1)
    host.plan_verify(_build(host, ops, context, config, block))
    return Proposal(block, None if randomness is None else SampledDrafts.none(randomness))


def _build(
    host: Host, ops: Ops, context: DraftContext, config: DFlashConfig, block: DraftBlock
) -> DraftBlock:
    """Fill a block with anchors and mask tokens."""
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


def pack_rows(
    ops: Ops, block: DraftBlock, bounds: Tensor, num_rows: int, buffers: StepBuffers
) -> DraftBlock:
    """Return a block of which the first rows of each request are verified, as the bounds say."""
    shared = buffers.shared(bounds, num_rows)
    ops.pack_rows(
        bounds,
        block.token_ids,
        block.positions,
        block.slots,
        out_token_ids=shared.token_ids,
        out_positions=shared.positions,
        out_slots=shared.slots,
        requests=shared.requests,
    )
    return replace(block, shared=shared)
