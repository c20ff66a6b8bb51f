"""What a batch of SGLang's asks for: as a plan for our kernels, or from SGLang's own sampler.

Stage 3 samples by a plan where our kernels can. For whatever else is asked, SGLang's sampler draws
each row of a block with the filters, the order and, where one is given, the seed that plain
decoding would use at that position, after what comes before sampling there: penalties, grammar,
logit bias, custom processors, in plain decoding's order. Keeping the drafts that match those draws
keeps the distribution exact (and the tokens, with a seed).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.models.heads import VerifyHead
from sglang_dflash.glue.sampling import grammar_mask
from sglang_dflash.glue.sampling.penalties import PenaltyTable, is_penalised
from sglang_dflash.kernels import MAX_TOP_K
from sglang_dflash.types import DraftBlock, DraftContext, SamplingPlan

# what SGLang takes for no top_k; top_k 1 is how it spells greedy
TOP_K_ALL = 1 << 30
PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")

OUTPUT = changes.Fields(
    "LogitsProcessorOutput",
    {
        "next_token_logits": "SGLang's sampler reads logits in fp32, capped",
        "next_token_logprobs": "logprobs of a block have a row for each request",
    },
)
REQ = changes.Fields(
    "Req",
    {
        "output_ids": "a custom processor sees the drafts before its row; taken back after it",
        "input_embeds": "a refused request runs one more step, without what it was refused for",
    },
)
PARAMS = changes.Fields(
    "SamplingParams",
    {"min_p": "a refused request runs one more step, without what it was refused for"},
)


def plan_of(batch: Any) -> SamplingPlan | None:
    """Return what our kernels are to sample for a batch; None if it is greedy, or asks for anything
    that only SGLang's sampler does."""
    if not _is_sampled_by_kernels(batch):
        return None
    info = batch.sampling_info
    top_ks = [req.sampling_params.top_k for req in batch.reqs]
    return SamplingPlan(
        temperatures=info.temperatures.flatten(),
        top_ks=info.top_ks,
        top_ps=info.top_ps,
        any_top_k=any(1 < top_k <= MAX_TOP_K for top_k in top_ks),
        any_unfiltered=any(top_k > MAX_TOP_K for top_k in top_ks),
    )


def _is_sampled_by_kernels(batch: Any) -> bool:
    """Tell whether every request samples from all tokens or from few, by top_k and top_p, and
    without a seed."""
    info = batch.sampling_info
    return not (
        info.is_all_greedy
        or is_adjusted(batch)
        or info.sampling_seed is not None
        or info.need_min_p_sampling
        or any(info.return_sampling_masks or ())
    ) and all(_is_top_k_or_unfiltered(req.sampling_params) for req in batch.reqs)


def _is_top_k_or_unfiltered(params: Any) -> bool:
    return params.top_k <= MAX_TOP_K or (params.top_k >= TOP_K_ALL and params.top_p == 1.0)


class RowSampler:
    """SGLang's sampler, for blocks of requests that may each want something else."""

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
        greedy: Tensor | None = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> Tensor | None:
        """Return the target's token after each row, [b, B] int64; logprobs go to `logits_output`.

        `greedy` begins with the argmax of each row, where a graph has taken it. None: the batch is
        greedy, and the argmax of its logits is still to be taken.
        """
        info = batch.sampling_info
        logits = logits_output.next_token_logits
        shape = block.token_ids.shape
        if info.is_all_greedy and not is_adjusted(batch):
            return None if greedy is None else greedy[: shape.numel()].view(shape)
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
            # row k's choice is committed token k wherever token k is committed
            logprobs = logits_output.next_token_logprobs
            OUTPUT.write(logits_output, next_token_logprobs=logprobs.view(shape))
        return choices.view(shape).long()


def is_adjusted(batch: Any) -> bool:
    """Tell whether a batch asks for more than a choice from each row's logits as they are."""
    info = batch.sampling_info
    return (
        info.logit_bias is not None
        or batch.return_logprob
        or batch.has_grammar
        or info.has_custom_logit_processor
        or any(is_penalised(req) for req in batch.reqs)
    )


def _repeat_rows(sampling_info: Any, times: int) -> Any:
    rows = copy.copy(sampling_info)
    for name in PER_REQUEST:
        value = getattr(sampling_info, name)
        if value is not None:
            setattr(rows, name, value.repeat_interleave(times, dim=0))
    # run before the sampler, where each row's own past is known
    rows.has_custom_logit_processor = False
    return rows


def _repeat(values: Sequence[Any] | None, times: int) -> list[Any]:
    return [value for value in values or () for _ in range(times)]


def _mask(
    logits: Tensor, batch: Any, block: DraftBlock, barrier: Callable[[], None] | None
) -> None:
    # with overlap the tokens of the step before may not have moved the matchers yet
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
    """Run the processors on each row while the requests look as if its drafts were generated."""
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


def refuse_request(req: Any, server_args: Any, *, enable_overlap: bool) -> str | None:
    """Return why a request cannot be served exactly, None if it can."""
    params = req.sampling_params
    constrained = any((params.json_schema, params.regex, params.ebnf, params.structural_tag))
    backend = server_args.grammar_backend
    if req.return_hidden_states:
        return _refusal("return_hidden_states", "those of a block feed the drafter and are dropped")
    if req.custom_logit_processor is not None and enable_overlap:
        return _refusal(
            "custom_logit_processor",
            "with overlap scheduling a processor sees an answer that lags behind",
            "start the server with --disable-overlap-schedule",
        )
    if constrained and backend not in grammar_mask.BACKENDS:
        return _refusal(
            "structured output",
            f"--grammar-backend {backend} cannot step back from a draft that was wrong",
            f"start the server with --grammar-backend {' or '.join(grammar_mask.BACKENDS)}",
        )
    if req.input_embeds is not None:
        dtype = server_args.get_model_config().dtype
        if dtype != torch.bfloat16:
            return _refusal(
                "input_embeds",
                f"SGLang turns them to bfloat16, which a target in {dtype} cannot read",
                "or start the server with --dtype bfloat16",
            )
    if params.min_p > 0 and server_args.enable_deterministic_inference:
        return _refusal("min_p", "SGLang's seeded sampler has no min_p")
    return None


def _refusal(what: str, why: str, instead: str | None = None) -> str:
    advice = ["Drop the parameter", "send the request to a server without DFLASH"]
    if instead is not None:
        advice.append(instead)
    return f"DFLASH cannot serve {what} exactly: {why}. {', '.join(advice[:-1])}, or {advice[-1]}."


def refuse_in_scheduler(original: Any, req: Any, enable_overlap: bool) -> str | None:
    """Stand in for SGLang's check of a request; other block drafters keep theirs."""
    server_args = compat.get_server_args()
    if server_args.speculative_algorithm != "DFLASH":
        return original(req, enable_overlap)
    reason = refuse_request(req, server_args, enable_overlap=enable_overlap)
    if reason is not None:
        # SGLang runs an aborted request through one more step, which must not fail on the parameter
        PARAMS.write(req.sampling_params, min_p=0.0)
        REQ.write(req, input_embeds=None)
    return reason
