"""Stage 3: follow the draft while the target agrees, and lay out what each request gains.

Each row's choice is the target's own, greedy or sampled, so committing the agreed prefix and the
first choice that differs gives exactly the tokens that the target would have produced one at a
time. Where drafts were drawn from a known distribution the target's output says how many to keep
(`kernels/draws.py`): more of them, and as exactly.
"""

from __future__ import annotations

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
    simulation: Simulation | None = None,
) -> Commit:
    """Commit the drafts that the target keeps, and its own token after them."""
    num_correct = target.num_correct
    if simulation is not None:
        num_correct = simulation.num_correct(target)
    lens, token_ids, bonus, new_lens, slots = ops.accept_block(
        block.token_ids, target.choices, context.lens, block.slots, num_correct
    )
    return Commit(lens=lens, token_ids=token_ids, bonus=bonus, new_lens=new_lens, slots=slots)


class Simulation:
    """Pretend that every request commits the same number of tokens, `accept_length` on average.

    For measuring what a step costs at a given acceptance; the output is nonsense. Nothing is left
    to chance: the n-th step is the same in every process, so that ranks need not agree on it.
    """

    def __init__(self, accept_length: float) -> None:
        self._accept_length = accept_length
        self._steps = 0

    def num_correct(self, target: TargetOutput) -> Tensor:
        """Return the correct drafts of each request in the next step, [b] int32."""
        before = int(self._steps * self._accept_length)
        self._steps += 1
        num_tokens = int(self._steps * self._accept_length) - before
        rows, block_size = target.choices.shape
        last = min(max(num_tokens, 1), block_size) - 1
        return torch.full((rows,), last, dtype=torch.int32, device=target.choices.device)
