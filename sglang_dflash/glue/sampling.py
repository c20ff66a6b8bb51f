"""The target's own choice for every row of a block, by SGLang's sampler.

Sampled requests draw each row with the filters, the order and, where one is given, the seed that
plain decoding would use at that position; walking the draft along those draws keeps the
distribution exact (and the tokens, with a seed).
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from sglang_dflash.glue import compat
from sglang_dflash.glue.head import VerifyHead

PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")


def choose_rows(
    sampler: Any, head: VerifyHead, logits_output: Any, sampling_info: Any, positions: Tensor
) -> Tensor:
    """Return the target's token after each row, [b, B]. Sampling overwrites the logits.

    `positions` [b, B] are the rows' own positions, which seed the sampler's noise.
    """
    logits = logits_output.next_token_logits
    if sampling_info.is_all_greedy and sampling_info.logit_bias is None:
        return head.greedy(logits).view(positions.shape)
    logits_output.next_token_logits = logits = head.plain(logits)
    rows = _repeat_rows(sampling_info, positions.shape[1])
    rows.apply_logits_bias(logits)
    choices = sampler(logits_output, rows, False, [], [], positions.flatten())
    return choices.view(positions.shape).long()


def _repeat_rows(sampling_info: Any, times: int) -> Any:
    rows = copy.copy(sampling_info)
    for name in PER_REQUEST:
        value = getattr(sampling_info, name)
        if value is not None:
            setattr(rows, name, value.repeat_interleave(times, dim=0))
    return rows


def refuse_request(req: Any) -> str | None:
    """Return why a request cannot be served exactly, None if it can."""
    params = req.sampling_params
    asked = {
        "logprobs": req.return_logprob,
        "return_hidden_states": req.return_hidden_states,
        "custom_logit_processor": req.custom_logit_processor is not None,
        "structured output (json_schema, regex, ebnf, structural_tag)": any(
            (params.json_schema, params.regex, params.ebnf, params.structural_tag)
        ),
        "frequency_penalty": params.frequency_penalty != 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "min_new_tokens": params.min_new_tokens > 0,
    }
    named = [name for name, given in asked.items() if given]
    if not named:
        return None
    return (
        f"DFLASH cannot serve {', '.join(named)} exactly yet. Drop the parameter, or send the "
        "request to a server without --speculative-algorithm DFLASH."
    )


def refuse_in_scheduler(original: Any, req: Any, enable_overlap: bool) -> str | None:
    """Stand in for SGLang's check of a request; other block drafters keep theirs."""
    if compat.get_server_args().speculative_algorithm != "DFLASH":
        return original(req, enable_overlap)
    return refuse_request(req)
