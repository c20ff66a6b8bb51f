"""Stage 3: decide which drafts each request keeps, and lay out the commit.

If the target's own token after each row is known, greedy or sampled, drafts that match it are kept.
Committing the leading matches and the first mismatching choice gives exactly the tokens that the
target would have produced one at a time. If drafts were sampled from a known distribution, block
verification keeps more of them and is just as exact (`kernels/sampling/reference.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_dflash.kernels import COUNT_MATCHES, MAX_TOP_K, Noise, Ops
from sglang_dflash.types import (
    Commit,
    DraftBlock,
    DraftContext,
    Proposal,
    SampledDrafts,
    SamplingPlan,
    TargetOutput,
    Verdict,
)


def decide(
    ops: Ops, plan: SamplingPlan | None, proposal: Proposal, target: TargetOutput
) -> Verdict:
    """Return the target's own tokens, sampled according to the plan, and which drafts to keep."""
    if target.choices is not None:
        return Verdict(target.choices)
    assert target.logits is not None, "the target returned neither choices nor logits"
    if plan is None:
        shape = proposal.block.token_ids.shape
        choices = ops.argmax_rows(target.logits, target.logit_cap)
        return Verdict(choices[: shape.numel()].view(shape))
    assert proposal.drafts is not None, "the plan samples, but the proposal does not"
    return _sample(ops, plan, proposal.drafts, target.logits, target.logit_cap)


def accept(
    ops: Ops,
    context: DraftContext,
    block: DraftBlock,
    verdict: Verdict,
    *,
    simulated: Sequence[int] | None = None,
) -> Commit:
    """Commit the kept drafts and the target's own token after them; for benchmarks, `simulated`
    says how many drafts each request keeps, whatever the verdict."""
    num_correct = verdict.num_correct
    if simulated is not None:
        num_correct = torch.tensor(simulated, dtype=torch.int32)
        num_correct = num_correct.to(context.lens.device, non_blocking=True)
    lens, token_ids, bonus, new_lens, slots = ops.accept_block(
        block.token_ids, verdict.choices, context.lens, block.slots, num_correct
    )
    return Commit(lens=lens, token_ids=token_ids, bonus=bonus, new_lens=new_lens, slots=slots)


def _sample(
    ops: Ops, plan: SamplingPlan, drafts: SampledDrafts, logits: Tensor, logit_cap: float
) -> Verdict:
    """Sample from each row with its request's temperature, top_k and top_p.

    A top_k request keeps the drafts that match its own tokens. An unfiltered request uses block
    verification if the full distribution of its drafts is known, and matching otherwise.
    """
    noise = Noise(drafts.randomness.keys, drafts.randomness.scales)
    requests = drafts.verified.shape[0]
    filtered = None
    if plan.any_top_k:
        filtered = ops.sample_rows(
            logits,
            noise,
            temperatures=plan.temperatures,
            top_ks=plan.top_ks.clamp(max=MAX_TOP_K),
            top_ps=plan.top_ps,
            logit_cap=logit_cap,
        ).view(requests, -1)
        if not plan.any_unfiltered:
            return _match(filtered, drafts)
    draft_logits = drafts.draft_logits
    if draft_logits is None or draft_logits.shape[-1] != logits.shape[-1]:
        sampled = ops.argmax_rows(logits, logit_cap, noise).view(requests, -1)
        if filtered is not None:
            sampled = sampled.where(_is_unfiltered(plan)[:, None], filtered)
        return _match(sampled, drafts)
    choices, num_correct, advantage = ops.reject_by_block(
        logits.unflatten(0, (requests, -1)),
        draft_logits,
        drafts.verified,
        drafts.argmax_drafts,
        noise,
        drafts.randomness.uniforms[:, : drafts.verified.shape[1]],
        is_sampled=drafts.is_sampled,
        logit_cap=logit_cap,
    )
    if filtered is None:
        return Verdict(choices, num_correct, advantage)
    is_unfiltered = _is_unfiltered(plan)
    return Verdict(
        choices.where(is_unfiltered[:, None], filtered),
        num_correct.where(is_unfiltered, COUNT_MATCHES),
        advantage.where(is_unfiltered[:, None], _advantage(filtered, drafts)),
    )


def _match(choices: Tensor, drafts: SampledDrafts) -> Verdict:
    """Keep the drafts that match the target's own tokens."""
    return Verdict(choices, advantage=_advantage(choices, drafts))


def _advantage(choices: Tensor, drafts: SampledDrafts) -> Tensor:
    """Return the matches of the sampled drafts minus those of the argmax drafts, [b, W - 1]."""
    own = choices[:, :-1]
    return (drafts.sampled_drafts == own).float() - (drafts.argmax_drafts == own).float()


def _is_unfiltered(plan: SamplingPlan) -> Tensor:
    """Return which requests sample from the full vocabulary, [b] bool."""
    return plan.top_ks > MAX_TOP_K
