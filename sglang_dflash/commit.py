"""Stage 4: let the drafter know what was committed."""

from __future__ import annotations

from sglang_dflash.host import Host
from sglang_dflash.types import Commit, DraftBlock, TargetOutput


def write_features(host: Host, block: DraftBlock, target: TargetOutput, commit: Commit) -> None:
    """Write the draft KV of the committed rows, and of no other.

    Row k holds block token k, so the committed rows are the first lens: the anchor and the correct
    drafts. The bonus has no feature yet; it is the anchor of the next block.
    """
    host.write_draft_kv(target.features, block.positions.flatten(), commit.slots.flatten())
