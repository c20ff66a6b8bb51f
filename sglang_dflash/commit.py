"""Stage 4: pass the commit on to everything that tracks a request, here and nowhere else.

Tokens per request are metered later, once it is known which of them are part of the answer
(`glue/after_step/request_end.py`). Here the host counts the step.
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
    """Pass a step's commit to the drafter, the policy and the host, in this order."""
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
    """Write the draft KV of the committed rows only.

    Row k of a request holds block token k, so the committed rows are its first `lens`: the anchor
    and correct drafts. The bonus has no feature yet; it is the anchor of the next block.
    """
    host.write_draft_kv(target.features, block.rows.positions, commit.slots.flatten())
