"""DFlash on one page: what happens to a batch in prefill and in a decode step."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sglang_dflash.accept import accept, decide, together
from sglang_dflash.buffers import StepBuffers
from sglang_dflash.commit import commit_step, write_features
from sglang_dflash.config import DFlashConfig
from sglang_dflash.draft import draft, propose_anchors
from sglang_dflash.host import Host
from sglang_dflash.kernels import Ops
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.simulate import DrawnAcceptance, SteadyAcceptance
from sglang_dflash.types import Commit, DraftContext, RowShare
from sglang_dflash.verify import verify


def prefill_step(host: Host, *, features: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Write the draft KV of the prompt tokens that the target has just prefilled."""
    host.write_draft_kv(features, positions, slots)


def undrafted_step(
    host: Host,
    ops: Ops,
    context: DraftContext,
    *,
    passes: int,
    buffers: StepBuffers,
    config: DFlashConfig,
) -> Commit:
    """Generate a token in each of several passes of one row per request, as plain decoding does,
    before the scheduler hears of any.

    Where the scheduler takes longer than the target, it is paid for once in several tokens. The
    number of passes is set before the step, and each samples from the target alone.
    """
    host.mark()
    plan = host.sampling_plan()
    randomness = buffers.randomness.draw(plan)
    host.mark()
    commits: list[Commit] = []
    for _ in range(passes):
        if commits:
            context = replace(context, anchors=commits[-1].bonus, lens=commits[-1].new_lens)
            host.begin_pass(context.lens)
            if randomness is not None:
                # new noise; uniforms are for drafts, and the scales stay
                randomness.keys.random_()
        proposal = propose_anchors(host, ops, context, randomness, buffers=buffers, config=config)
        target = verify(host, context, proposal.block, plan)
        verdict = decide(ops, plan, proposal, target)
        host.agree(*verdict.decisions())
        commits.append(accept(ops, context, proposal, verdict))
        write_features(host, proposal.block, target, commits[-1])
    host.mark()
    commit = together(commits)
    host.publish(commit.new_lens)
    host.record(commit)
    host.mark()
    return commit


def decode_step(
    host: Host,
    ops: Ops,
    context: DraftContext,
    *,
    width: int,
    share: RowShare | None = None,
    buffers: StepBuffers,
    policy: DraftPolicy,
    config: DFlashConfig,
    simulation: SteadyAcceptance | DrawnAcceptance | None,
) -> Commit:
    """Draft a block, verify its first `width` tokens, or as many as each request gets of shared
    rows, and commit the prefix that the target itself would have generated.

    The committed tokens are exact, however many are verified, because what is cut off is neither
    looked at nor part of any decision: the target's token after each verified row is the same, or
    has the same distribution, whether or not rows follow it (`width.py` has the proof).
    """
    simulated = None
    if simulation is not None:
        simulated = simulation.draw(host.request_ids(), width)
    host.mark()
    plan = host.sampling_plan()
    proposal = draft(
        host,
        ops,
        context,
        plan,
        width=width,
        share=share,
        confidence=None if simulated is None else simulated.confidence,
        buffers=buffers,
        policy=policy,
        config=config,
    )
    host.mark()
    target = verify(host, context, proposal.block, plan)
    host.mark()
    verdict = decide(ops, plan, proposal, target)
    host.agree(*verdict.decisions())
    num_correct = None if simulated is None else simulated.num_correct
    commit = accept(ops, context, proposal, verdict, simulated=num_correct)
    host.advance_states(commit)
    # publish before the draft KV write: planning the next step reads lengths, not this cache
    host.publish(commit.new_lens)
    commit_step(host, policy, context, proposal, target, verdict, commit)
    host.mark()
    return commit
