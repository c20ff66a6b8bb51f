"""Stage 3: follow the draft while the target agrees.

The rule is the same whether the target chose greedily or sampled: each row's choice is the
target's own, so committing the agreed prefix and the first choice that differs gives exactly the
tokens that the target would have produced one at a time.
"""

from __future__ import annotations

import random

import torch

from sglang_dflash.kernels import Ops
from sglang_dflash.types import Acceptance, DraftBlock, TargetOutput


def accept(ops: Ops, block: DraftBlock, target: TargetOutput) -> Acceptance:
    """Count the drafts that equal the target's choices, and take the target's token after them."""
    num_correct, bonus = ops.accept_walk(block.token_ids, target.choices)
    return Acceptance(num_correct=num_correct, bonus=bonus)


def simulate(target: TargetOutput, accept_length: float) -> Acceptance:
    """Pretend that every request commits the same number of tokens, `accept_length` on average.

    For measuring what a step costs at a given acceptance; the output is nonsense.
    """
    whole = int(accept_length)
    num_tokens = whole + (random.random() < accept_length - whole)
    rows, block_size = target.choices.shape
    last = min(max(num_tokens, 1), block_size) - 1
    count = torch.full((rows,), last, dtype=torch.int32, device=target.choices.device)
    return Acceptance(num_correct=count, bonus=target.choices[:, last])
