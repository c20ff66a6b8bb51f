"""Which drafts a sampled request verifies: the drafter's argmax tokens, or tokens sampled from it.

When the target is uncertain, sampled drafts are accepted more often: block verification accepts or
rejects them such that the committed tokens follow the target's own distribution
(`kernels/sampling/reference.py`). When only the drafter is uncertain, argmax drafts match more
often. So each request verifies the kind that would have been accepted more often so far. A new
request starts with the advantage of other requests at its temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.types import DraftOutput, Randomness, SampledDrafts

# decay of the evidence per step: about the last 50 steps count
ADVANTAGE_DECAY = 0.98
# bins of width 1/8, and one for 2 and above
TEMPERATURE_BINS = 17


class DraftPolicy:
    """The decayed advantage of sampled over argmax drafts, per request row and temperature bin."""

    def __init__(self, max_requests: int, device: torch.device | str) -> None:
        self._advantage = torch.zeros(max_requests, device=device)
        self._advantage_by_temperature = torch.zeros(TEMPERATURE_BINS, device=device)

    def start(self, request_rows: Tensor, temperatures: Tensor) -> None:
        """Initialise requests with the mean advantage at their temperatures [b]."""
        usual = self._advantage_by_temperature[_bins(temperatures)]
        self._advantage.index_copy_(0, request_rows, usual)

    def select(
        self, request_rows: Tensor, drafts: DraftOutput, randomness: Randomness
    ) -> SampledDrafts:
        """Choose which kind of drafts each request verifies."""
        is_sampled = self._advantage[request_rows] >= 0
        return SampledDrafts(
            argmax_drafts=drafts.argmax_drafts,
            sampled_drafts=drafts.sampled_drafts,
            is_sampled=is_sampled,
            verified=torch.where(is_sampled[:, None], drafts.sampled_drafts, drafts.argmax_drafts),
            draft_logits=drafts.logits,
            randomness=randomness,
        )

    def learn(
        self, request_rows: Tensor, advantage: Tensor, *, temperatures: Tensor, lens: Tensor
    ) -> None:
        """Accumulate a verdict's advantage [b, B - 1] over the committed rows: past them, the
        target's choices are conditioned on tokens that were not committed. Non-finite values, as
        from an infinite logit, count as 0."""
        width = advantage.shape[1]
        is_committed = torch.arange(width, device=request_rows.device) < lens[:, None]
        advantage = advantage.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * is_committed
        # an advantage is at most 1, so the decayed sum never exceeds this
        most = width / (1 - ADVANTAGE_DECAY)
        decayed = ADVANTAGE_DECAY * self._advantage[request_rows]
        total = (decayed + advantage.sum(dim=1)).clamp_(-most, most)
        self._advantage.index_copy_(0, request_rows, total)
        self._advantage_by_temperature.scatter_reduce_(0, _bins(temperatures), total, "mean")


def _bins(temperatures: Tensor) -> Tensor:
    # clamped first: a huge temperature would overflow to a negative bin
    return (temperatures * 8).clamp(max=TEMPERATURE_BINS - 1).long()
