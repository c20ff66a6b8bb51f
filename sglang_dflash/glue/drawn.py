"""What a step's sampled drafts are made of, and what the target chose: passed between stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dflash.kernels import Noise


@dataclass(frozen=True)
class SampledDrafts:
    """Both kinds of drafts that were made, and which of them are verified."""

    likeliest: Tensor  # [b, B - 1] int64
    drawn: Tensor  # [b, B - 1] int64
    is_drawn: Tensor  # [b] bool: whether a request's drawn drafts are verified
    # [b, B - 1, V] what both were chosen from; None on a rank that sees a part of the vocabulary
    logits: Tensor | None
    noise: Noise
    lots: Tensor  # [b, B - 1] fp32, uniform from 0 to 1

    @cached_property
    def verified(self) -> Tensor:
        return torch.where(self.is_drawn[:, None], self.drawn, self.likeliest)


class Chosen(NamedTuple):
    """The target's choices for a block, [b, B] int64, and where they were drawn, what follows."""

    choices: Tensor
    num_correct: Tensor | None = None  # [b] int32, the drafts to keep; None: those that are chosen
    gain: Tensor | None = None  # [b, B - 1] fp32, how much drawn drafts had over likeliest ones
