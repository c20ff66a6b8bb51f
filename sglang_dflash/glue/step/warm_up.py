"""Kernels that are compiled before serving, so that no step waits for a compiler."""

from __future__ import annotations

import torch

from sglang_dflash.accept import accept
from sglang_dflash.buffers import StepBuffers
from sglang_dflash.draft import pack_rows
from sglang_dflash.kernels import Ops
from sglang_dflash.kernels.extents import padded
from sglang_dflash.types import DraftBlock, DraftContext, Proposal, Verdict


def compile_sharing(ops: Ops, buffers: StepBuffers, *, max_requests: int, block_size: int) -> None:
    """Share out the rows of a batch of each size, once: every size has its own kernel."""
    for size in sorted({padded(requests) for requests in range(1, max_requests + 1)}):
        requests = min(size, max_requests)
        block: DraftBlock = buffers.verified.block(requests, block_size)
        lens = block.slots.new_zeros(requests)
        confidence = torch.zeros(requests, block_size - 1, device=lens.device)
        bounds = ops.share_rows(confidence, confidence[0], confidence[0], requests)
        shared = pack_rows(ops, block, bounds, requests, buffers)
        context = DraftContext(anchors=lens, lens=lens, request_rows=lens)
        accept(ops, context, Proposal(shared), Verdict(shared.rows.token_ids))
