"""Stage 4: everyone who follows a request learns what was committed, here and nowhere else.

The meter counts a step's tokens per request later, when it is known which of them are part of the
answer (`glue/after_step/request_end.py`); here the host counts the step.
"""

from __future__ import annotations

from sglang_dflash.host import Host
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.types import Commit, DraftBlock, DraftContext, Proposal, TargetOutput, Verdict


def commit_step(
    host: Host,
    policy: DraftPolicy,
    context: DraftContext,
    proposal: Proposal,
    target: TargetOutput,
    verdict: Verdict,
    commit: Commit,
) -> None:
    """Tell the drafter, the policy and the host what a step has committed, in this order."""
    write_features(host, proposal.block, target, commit)
    if proposal.drafts is not None and verdict.advantage is not None:
        policy.learn(
            context.request_rows,
            verdict.advantage,
            temperatures=proposal.drafts.randomness.scales,
            lens=commit.lens,
        )
    host.record(commit)


def write_features(host: Host, block: DraftBlock, target: TargetOutput, commit: Commit) -> None:
    """Write the draft KV of the committed rows, and of no other.

    Row k holds block token k, so the committed rows are the first lens: the anchor and the correct
    drafts. The bonus has no feature yet; it is the anchor of the next block.
    """
    host.write_draft_kv(target.features, block.positions.flatten(), commit.slots.flatten())
