"""SGLang's own sampler, for everything that our kernels do not sample.

It samples each row of a block with the filters, their order and the seed (if any) that plain
decoding would use at that position. Before it come penalties, grammar mask, logit bias and custom
processors, in plain decoding's order. Keeping the drafts that match the sampled tokens keeps the
distribution exact (and the tokens, with a seed).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.models.heads import VerifyHead
from sglang_dflash.glue.sampling import grammar_mask
from sglang_dflash.glue.sampling.penalties import PenaltyTable
from sglang_dflash.types import DraftBlock, DraftContext

PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")

OUTPUT = changes.Fields(
    "LogitsProcessorOutput",
    {
        "next_token_logits": "SGLang's sampler expects fp32 logits with the softcap applied",
        "next_token_logprobs": "the logprobs of a block are grouped by request",
    },
)
REQ = changes.Fields(
    "Req",
    {
        "output_ids": "a custom logit processor sees the drafts before its row; removed afterwards",
    },
)


class RowSampler:
    """SGLang's sampler over blocks of requests with different sampling parameters."""

    def __init__(self, sampler: Any, head: VerifyHead, penalties: PenaltyTable) -> None:
        self._sampler = sampler
        self._head = head
        self.penalties = penalties

    def choose(
        self,
        batch: Any,
        logits_output: Any,
        context: DraftContext,
        block: DraftBlock,
        *,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the target's token after each row, [b, W] int64. Logprobs go to the output."""
        info = batch.sampling_info
        logits = logits_output.next_token_logits
        shape = block.token_ids.shape
        logits = self._head.as_sampler_logits(logits)
        OUTPUT.write(logits_output, next_token_logits=logits)
        by_row = logits.view(*shape, -1)
        rows = _repeat_rows(info, shape[1])
        self.penalties.apply(by_row, batch.reqs, block.token_ids, context.lens)
        if batch.has_grammar:
            _mask(logits, batch, block, grammar_barrier)
        if rows.logit_bias is not None:
            logits.add_(rows.logit_bias)
        if info.has_custom_logit_processor:
            _run_custom_processors(by_row, info, batch.reqs, block.token_ids.tolist())
        choices = self._sampler(
            logits_output,
            rows,
            batch.return_logprob,
            _repeat(batch.top_logprobs_nums, shape[1]),
            _repeat(batch.token_ids_logprobs, shape[1]),
            block.positions.flatten(),
        )
        if batch.return_logprob:
            # if token k is committed, it is row k's choice
            logprobs = logits_output.next_token_logprobs
            OUTPUT.write(logits_output, next_token_logprobs=logprobs.view(shape))
        return choices.view(shape).long()


def _repeat_rows(sampling_info: Any, times: int) -> Any:
    rows = copy.copy(sampling_info)
    for name in PER_REQUEST:
        value = getattr(sampling_info, name)
        if value is not None:
            setattr(rows, name, value.repeat_interleave(times, dim=0))
    # they run before the sampler, where each row's own prefix is known
    rows.has_custom_logit_processor = False
    return rows


def _repeat(values: Sequence[Any] | None, times: int) -> list[Any]:
    return [value for value in values or () for _ in range(times)]


def _mask(
    logits: Tensor, batch: Any, block: DraftBlock, barrier: Callable[[], None] | None
) -> None:
    # with overlap the matchers may not have consumed the previous step's tokens yet
    if barrier is not None:
        barrier()
    if not any(req.grammar is not None for req in batch.reqs):
        return
    mask = grammar_mask.mask_rows(
        batch.reqs,
        block.token_ids.tolist(),
        vocab_size=batch.sampling_info.vocab_size,
        device=logits.device,
    )
    mask.apply(logits)


def _run_custom_processors(
    by_row: Tensor, info: Any, reqs: Sequence[Any], blocks: Sequence[Sequence[int]]
) -> None:
    """Run the processors on each row, with the drafts before it shown as generated output."""
    width = by_row.shape[1]
    shown = 0
    try:
        for row in range(width):
            compat.apply_custom_logit_processor(by_row[:, row], info)
            if row + 1 < width:
                for req, block in zip(reqs, blocks, strict=True):
                    REQ.edit(req, "output_ids").append(block[row + 1])
                shown += 1
    finally:
        if shown:
            for req in reqs:
                del REQ.edit(req, "output_ids")[-shown:]
