"""Stage 2: run the target on every row of the block in one forward pass."""

from __future__ import annotations

from sglang_dflash.host import Host
from sglang_dflash.types import DraftBlock, DraftContext, SamplingPlan, TargetOutput


def verify(
    host: Host, context: DraftContext, block: DraftBlock, plan: SamplingPlan | None
) -> TargetOutput:
    """Return the target's choices or logits for each row, and the features for the drafter."""
    target = host.verify_block(context, block, plan)
    if target.choices is not None:
        rows = block.token_ids if block.shared is None else block.shared.token_ids
        assert target.choices.shape == rows.shape, (
            f"the target returned choices of shape {tuple(target.choices.shape)} for rows of shape "
            f"{tuple(rows.shape)}"
        )
    return target
