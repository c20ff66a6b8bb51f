"""Refusal, with a reason, of requests that cannot be served exactly."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.glue import changes, seams
from sglang_dflash.glue.sampling import grammar_mask

REQ = changes.Fields(
    "Req",
    {"input_embeds": "a refused request runs one more step, without the refused parameter"},
)
PARAMS = changes.Fields(
    "SamplingParams",
    {"min_p": "a refused request runs one more step, without the refused parameter"},
)


def refuse_request(req: Any, server_args: Any, *, enable_overlap: bool) -> str | None:
    """Return why a request cannot be served exactly, None if it can."""
    params = req.sampling_params
    constrained = any((params.json_schema, params.regex, params.ebnf, params.structural_tag))
    backend = server_args.grammar_backend
    if req.return_hidden_states:
        return _refusal(
            "return_hidden_states", "a block's hidden states feed the drafter and are then dropped"
        )
    if seams.offers_sampling_masks(req):
        return _refusal("return_sampling_mask", "the masks of a block's rows are not kept")
    if req.custom_logit_processor is not None and enable_overlap:
        return _refusal(
            "custom_logit_processor",
            "with overlap scheduling the processor would see an output that lags behind",
            "start the server with --disable-overlap-schedule",
        )
    if constrained and backend not in grammar_mask.BACKENDS:
        return _refusal(
            "structured output",
            f"--grammar-backend {backend} cannot roll back rejected drafts",
            f"start the server with --grammar-backend {' or '.join(grammar_mask.BACKENDS)}",
        )
    if req.input_embeds is not None:
        dtype = seams.model_config(server_args).dtype
        if dtype != torch.bfloat16:
            return _refusal(
                "input_embeds",
                f"SGLang converts them to bfloat16, which a target in {dtype} cannot use",
                "start the server with --dtype bfloat16",
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
    """Replace SGLang's request check for DFLASH; other block drafters keep it."""
    server_args = seams.settings()
    if server_args.speculative_algorithm != "DFLASH":
        return original(req, enable_overlap)
    reason = refuse_request(req, server_args, enable_overlap=enable_overlap)
    if reason is not None:
        # SGLang runs an aborted request for one more step, which must not fail on the parameter
        PARAMS.write(req.sampling_params, min_p=0.0)
        REQ.write(req, input_embeds=None)
    return reason
