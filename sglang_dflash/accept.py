"""Stage 3: follow the draft while the target agrees.

The rule is the same whether the target chose greedily or sampled: each row's choice is the
target's own, so committing the agreed prefix and the first choice that differs gives exactly the
tokens that the target would have produced one at a time.
"""

from __future__ import annotations

from sglang_dflash.kernels import Ops
from sglang_dflash.types import Acceptance, DraftBlock, TargetOutput


def accept(ops: Ops, block: DraftBlock, target: TargetOutput) -> Acceptance:
    """Count the drafts that equal the target's choices, and take the target's token after them."""
    num_correct, bonus = ops.accept_walk(block.token_ids, target.choices)
    return Acceptance(num_correct=num_correct, bonus=bonus)
