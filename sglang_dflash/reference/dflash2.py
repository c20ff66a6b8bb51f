"""What a DFlash2 drafter adds to a plain one, in plain torch: a convolution over the rows of a
block around each sublayer, and a selector of drafts. `dflash2_format.py` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sglang_dflash.dflash2_format import DFlash2


class BlockConvolution(nn.Module):
    """The convolutions before and after a sublayer."""

    def __init__(self, settings: DFlash2, hidden_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = settings.conv_taps, settings.conv_group_size
        groups = hidden_size // self.group_size
        # initially the identity
        base = torch.zeros(2, self.taps, hidden_size)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.taps * groups, bias=False)

    def around(
        self,
        sublayer: Callable[[Tensor], Tensor],
        x: Tensor,  # [b, N * B, H], N blocks of B rows
        *,
        block_size: int,
    ) -> Tensor:
        """Return the convolved output of a sublayer on its convolved input."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        dynamic = dynamic.repeat_interleave(self.group_size, dim=-1)
        before, after = (dynamic[..., side, :, :] + self.base_kernel[side] for side in (0, 1))
        return _convolve(sublayer(_convolve(x, before, block_size)), after, block_size)


def _convolve(
    x: Tensor,  # [b, N * B, H]
    kernels: Tensor,  # [b, N * B, T, H]
    block_size: int,
) -> Tensor:
    blocks, kernels = (t.unflatten(1, (-1, block_size)) for t in (x, kernels))
    out = torch.zeros_like(blocks)
    for row in range(block_size):
        for tap in range(min(kernels.shape[-2], row + 1)):
            out[:, :, row] += kernels[:, :, row, tap] * blocks[:, :, row - tap]
    return out.flatten(1, 2)


class CandidateSelector(nn.Module):
    """Scores the likeliest tokens of a position by the token before it."""

    def __init__(self, settings: DFlash2, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.settings = settings
        rank = settings.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank).normal_(std=0.02))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank).normal_(std=0.02))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def after(
        self,
        previous: int,
        logits: Tensor,  # [V], the target's head on `hidden`
        hidden: Tensor,  # [H]
    ) -> Tensor:
        """Return the logits of the token after `previous`, [V]; -inf unless it is a candidate."""
        # by the head's own logits: a cap can make some of them equal
        candidates = logits.topk(self.settings.selector_top_k).indices
        unary = logits[candidates].float() * self.settings.output_multiplier
        if cap := self.settings.logit_cap:
            unary = cap * torch.tanh(unary / cap)
        gate = self.hidden_projection(hidden) * self.predecessor_codebook[previous]
        pairwise = self.successor_codebook[candidates] @ gate
        scores = torch.full(logits.shape, float("-inf"), device=logits.device)
        return scores.index_copy(0, candidates, unary + pairwise.float())
