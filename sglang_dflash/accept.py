"""Stage 3: follow the draft while the target agrees, and lay out what each request gains.

Each row's choice is the target's own, greedy or sampled, so committing the agreed prefix and the
first choice that differs gives exactly the tokens that the target would have produced one at a
time. Where drafts were drawn from a known distribution the target's output says how many to keep
(`kernels/draws.py`): more of them, and as exactly.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from sglang_dflash.kernels import Ops
from sglang_dflash.types import Commit, DraftBlock, DraftContext, TargetOutput


def accept(
    ops: Ops,
    context: DraftContext,
    block: DraftBlock,
    target: TargetOutput,
    *,
    simulated_length: float | None = None,
) -> Commit:
    """Commit the drafts that the target keeps, and its own token after them."""
    num_correct = target.num_correct
    if simulated_length is not None:
        num_correct = simulate(target, simulated_length)
    lens, token_ids, bonus, new_lens, slots = ops.accept_block(
        block.token_ids, target.choices, context.lens, block.slots, num_correct
    )
    return Commit(lens=lens, token_ids=token_ids, bonus=bonus, new_lens=new_lens, slots=slots)


def simulate(target: TargetOutput, accept_length: float) -> Tensor:
    """Pretend that every request commits the same number of tokens, `accept_length` on average;
    return the correct drafts of each, [b] int32.

    For measuring what a step costs at a given acceptance; the output is nonsense.
    """
    whole = int(accept_length)
    num_tokens = whole + (random.random() < accept_length - whole)
    rows, block_size = target.choices.shape
    last = min(max(num_tokens, 1), block_size) - 1
    return torch.full((rows,), last, dtype=torch.int32, device=target.choices.device)
