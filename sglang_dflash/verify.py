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
        assert target.choices.shape == block.token_ids.shape, (
            f"the target returned choices of shape {tuple(target.choices.shape)} for a block of "
            f"shape {tuple(block.token_ids.shape)}"
        )
    return target
