"""Stage 4: turn an acceptance into tokens, lengths and draft KV."""

from __future__ import annotations

from sglang_dflash.host import Host
from sglang_dflash.kernels import Ops
from sglang_dflash.types import Acceptance, Commit, DraftBlock, DraftContext, TargetOutput


def plan_commit(
    ops: Ops, context: DraftContext, block: DraftBlock, acceptance: Acceptance
) -> Commit:
    """Lay out the tokens each request gains: its correct drafts, then the bonus."""
    lens, token_ids, new_lens = ops.commit_tokens(
        block.token_ids, acceptance.num_correct, acceptance.bonus, context.lens
    )
    return Commit(lens=lens, token_ids=token_ids, bonus=acceptance.bonus, new_lens=new_lens)


def write_features(
    host: Host, ops: Ops, block: DraftBlock, target: TargetOutput, commit: Commit
) -> None:
    """Write the draft KV of the committed rows, and of no other.

    Row k holds block token k, so the committed rows are the first lens: the anchor and the correct
    drafts. The bonus has no feature yet; it is the anchor of the next block.
    """
    slots = ops.committed_slots(block.slots, commit.lens)
    host.write_draft_kv(target.features, block.positions.flatten(), slots.flatten())
