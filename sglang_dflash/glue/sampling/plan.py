"""The sampling plan of a batch, for stage 3 to sample with our kernels where they can."""

from __future__ import annotations

from typing import Any

from sglang_dflash.glue.sampling.penalties import is_penalised
from sglang_dflash.kernels import MAX_TOP_K
from sglang_dflash.types import SamplingPlan

# SGLang's top_k value for no filter; its top_k for greedy is 1
TOP_K_ALL = 1 << 30


def plan_of(batch: Any) -> SamplingPlan | None:
    """Return the sampling plan of a batch for our kernels; None if it is all greedy, or needs
    anything that only SGLang's sampler does."""
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
    """Return whether every request samples unfiltered or with a small top_k (and top_p), and
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


def is_adjusted(batch: Any) -> bool:
    """Return whether a batch needs logprobs, or any change to the logits before sampling."""
    info = batch.sampling_info
    return (
        info.logit_bias is not None
        or batch.return_logprob
        or batch.has_grammar
        or info.has_custom_logit_processor
        or any(is_penalised(req) for req in batch.reqs)
    )
