"""Stage 3: decide which drafts each request keeps, and lay out the commit.

If the target's own token after each row is known, greedy or sampled, drafts that match it are kept.
Committing the leading matches and the first mismatching choice gives exactly the tokens that the
target would have produced one at a time. If drafts were sampled from a known distribution, block
verification keeps more of them and is just as exact (`kernels/sampling/reference.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dflash.kernels import COUNT_MATCHES, MAX_TOP_K, Noise, Ops
from sglang_dflash.kernels.packing import unpack
from sglang_dflash.types import (
    Commit,
    DraftBlock,
    DraftContext,
    Proposal,
    SampledDrafts,
    SamplingPlan,
    SharedRows,
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
        choices = ops.argmax_rows(target.logits, target.logit_cap)
        return Verdict(_arranged(choices[: proposal.block.num_rows], proposal.block))
    assert proposal.drafts is not None, "the plan samples, but the proposal does not"
    return _sample(ops, plan, proposal.block, proposal.drafts, target.logits, target.logit_cap)


def accept(
    ops: Ops,
    context: DraftContext,
    proposal: Proposal,
    verdict: Verdict,
    *,
    simulated: NDArray[np.int64] | None = None,
) -> Commit:
    """Commit the kept drafts and the target's own token after them; for benchmarks, `simulated`
    says how many drafts each request keeps, if so many are verified, whatever the verdict."""
    block, num_correct = proposal.block, verdict.num_correct
    if simulated is not None:
        num_correct = torch.from_numpy(simulated.astype(np.int32))
        num_correct = num_correct.to(context.lens.device, non_blocking=True)
    rows, bounds = (block, None) if block.shared is None else (block.shared, block.shared.bounds)
    lens, token_ids, bonus, new_lens, slots = ops.accept_block(
        rows.token_ids,
        verdict.choices,
        context.lens,
        rows.slots,
        num_correct,
        bounds=bounds,
        width=block.token_ids.shape[1],
    )
    return Commit(
        lens=lens,
        token_ids=token_ids,
        bonus=bonus,
        new_lens=new_lens,
        slots=slots,
        bounds=bounds,
        confidence=proposal.confidence,
    )


def together(commits: Sequence[Commit]) -> Commit:
    """Return passes of one row per request, one after the other, as one commit."""
    first, last = commits[0], commits[-1]
    return Commit(
        lens=first.lens * len(commits),
        token_ids=torch.cat([commit.token_ids for commit in commits], dim=1),
        bonus=last.bonus,
        new_lens=last.new_lens,
        slots=torch.cat([commit.slots for commit in commits], dim=1),
    )


def _sample(
    ops: Ops,
    plan: SamplingPlan,
    block: DraftBlock,
    drafts: SampledDrafts,
    logits: Tensor,
    logit_cap: float,
) -> Verdict:
    """Sample from each row with its request's temperature, top_k and top_p.

    A top_k request keeps the drafts that match its own tokens. An unfiltered request uses block
    verification if the full distribution of its drafts is known, and matching otherwise.
    """
    shared = block.shared
    noise = Noise(drafts.randomness.keys, drafts.randomness.scales)
    rows, row_noise = (plan, noise) if shared is None else _each_row(plan, noise, shared)
    is_unfiltered = rows.top_ks > MAX_TOP_K
    if shared is None:
        is_unfiltered = is_unfiltered[:, None]
    filtered = None
    if plan.any_top_k:
        filtered = ops.sample_rows(
            logits,
            row_noise,
            temperatures=rows.temperatures,
            top_ks=rows.top_ks.clamp(max=MAX_TOP_K),
            top_ps=rows.top_ps,
            logit_cap=logit_cap,
        )
        filtered = _arranged(filtered, block)
        if not plan.any_unfiltered:
            return _match(filtered, block, drafts)
    draft_logits = drafts.draft_logits
    if draft_logits is None or draft_logits.shape[-1] != logits.shape[-1]:
        sampled = _arranged(ops.argmax_rows(logits, logit_cap, row_noise), block)
        if filtered is not None:
            sampled = sampled.where(is_unfiltered, filtered)
        return _match(sampled, block, drafts)
    choices, num_correct, advantage = ops.reject_by_block(
        logits if shared is not None else logits.unflatten(0, (drafts.verified.shape[0], -1)),
        draft_logits,
        drafts.verified,
        drafts.argmax_drafts,
        noise,
        drafts.randomness.uniforms[:, : drafts.verified.shape[1]],
        is_sampled=drafts.is_sampled,
        logit_cap=logit_cap,
        bounds=None if shared is None else shared.bounds,
        requests=None if shared is None else shared.requests,
    )
    if filtered is None:
        return Verdict(choices, num_correct, advantage)
    is_block_verified = plan.top_ks > MAX_TOP_K
    return Verdict(
        choices.where(is_unfiltered, filtered),
        num_correct.where(is_block_verified, COUNT_MATCHES),
        advantage.where(is_block_verified[:, None], _advantage(filtered, block, drafts)),
    )


def _each_row(plan: SamplingPlan, noise: Noise, shared: SharedRows) -> tuple[SamplingPlan, Noise]:
    """Return a plan and noise in which every row is a request of its own: otherwise the kernels
    take the same number of rows for each request."""
    requests = shared.requests
    keys = noise.keys[requests, shared.columns()][:, None]
    rows = replace(
        plan,
        temperatures=plan.temperatures[requests],
        top_ks=plan.top_ks[requests],
        top_ps=plan.top_ps[requests],
    )
    return rows, Noise(keys, noise.scales[requests])


def _match(choices: Tensor, block: DraftBlock, drafts: SampledDrafts) -> Verdict:
    """Keep the drafts that match the target's own tokens."""
    if not drafts.verified.shape[1]:
        return Verdict(choices)
    return Verdict(choices, advantage=_advantage(choices, block, drafts))


def _advantage(choices: Tensor, block: DraftBlock, drafts: SampledDrafts) -> Tensor:
    """Return the matches of the sampled drafts minus those of the argmax drafts, [b, W - 1];
    meaningless after a request's last row."""
    num_drafts = drafts.verified.shape[1]
    if block.shared is None:
        own = choices[:, :num_drafts]
    else:
        own = unpack(choices, block.shared.bounds, num_drafts)
    return (drafts.sampled_drafts == own).float() - (drafts.argmax_drafts == own).float()


def _arranged(choices: Tensor, block: DraftBlock) -> Tensor:
    """Return the rows' choices [n] as a verdict has them."""
    return choices.view(block.token_ids.shape) if block.shared is None else choices
