"""The noise of a step's sampled drafts, and which drafts are verified.

Two kinds of drafts are made for a request that samples: the drafter's likeliest tokens, and tokens
drawn from its distribution at the request's temperature. Where the target is uncertain, drawn ones
are kept more often: `kernels/draws.py` says how they are kept or dropped so that what is committed
is distributed as the target alone would draw it. Where only the drafter is uncertain the likeliest
are right more often. So what would have been kept so far decides, for each request, which of them
are verified. A new request begins with what holds for others of its temperature.

A request that draws by top_k and top_p keeps the drafts that its target's own draws fall on. These
have the noise of the drafts, which makes both alike, and which is new in each step, so that they
are draws from the target's distribution whatever was drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue.drawn import SampledDrafts
from sglang_dflash.glue.sampling import is_adjusted
from sglang_dflash.kernels import MAX_TOP_K, Noise

# what SGLang takes for no top_k
TOP_K_ALL = 1 << 30
# how much of the evidence is left a step later: about the last 50 steps count
MEMORY = 0.98
# temperatures are told apart to an eighth, and no more from 2 on
KINDS = 17


class StepNoise:
    """Noise of the largest batch, at fixed addresses, which captured draft graphs read."""

    def __init__(self, max_requests: int, block_size: int, device: torch.device | str) -> None:
        keys = torch.zeros(max_requests, block_size, dtype=torch.int64, device=device)
        self._whole = Noise(keys, torch.zeros(max_requests, device=device))
        self._lots = torch.zeros(max_requests, block_size - 1, device=device)
        self._on = False
        # how much drawn drafts had over likeliest ones: by request row, by temperature
        self._lead = torch.zeros(max_requests, device=device)
        self._usual = torch.zeros(KINDS, device=device)

    def room(self, num_requests: int) -> Noise:
        """Return what graphs of so many requests read: without effect while it is not drawn."""
        return Noise(*(each[:num_requests] for each in self._whole))

    def draw(self, batch: Any) -> Noise | None:
        """Draw for a step; return None, with the room without effect, if our kernels cannot draw
        all that the batch samples."""
        wanted = _is_drawn_by_kernels(batch)
        if self._on and not wanted:
            self._whole.scales.zero_()
        self._on = wanted
        if not wanted:
            return None
        info = batch.sampling_info
        noise = self.room(info.top_ks.shape[0])
        noise.keys.random_()
        self._lots.uniform_()
        # top_k 1 is how SGLang spells greedy
        noise.scales.copy_(torch.where(info.top_ks == 1, 0.0, info.temperatures.flatten()))
        return noise

    def start(self, rows: Tensor, temperatures: Tensor) -> None:
        """Begin requests at these rows with what is usual for their temperatures [b]."""
        self._lead.index_copy_(0, rows, self._usual[_kinds(temperatures)])

    def offer(
        self, rows: Tensor, noise: Noise, *, drafts: Tensor, logits: Tensor | None
    ) -> SampledDrafts:
        """Choose which drafts to verify from the likeliest and the drawn ones, [1 or 2, b, B - 1],
        that were made from these logits [b, B - 1, V] with a step's noise."""
        return SampledDrafts(
            likeliest=drafts[0],
            drawn=drafts[-1],
            is_drawn=self._lead[rows] >= 0,
            logits=logits,
            noise=noise,
            lots=self._lots[: rows.shape[0]],
        )

    def learn(self, rows: Tensor, gain: Tensor, *, lens: Tensor) -> None:
        """Count what drawn drafts had over likeliest ones [b, B - 1], as far as the target followed
        the block: beyond, its choices answer to tokens that were not committed. A gain that is no
        number, as of an infinite logit, says nothing."""
        width = gain.shape[1]
        followed = torch.arange(width, device=rows.device) < lens[:, None]
        gain = gain.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * followed
        # a gain is at most 1, so more is never remembered
        most = width / (1 - MEMORY)
        lead = (MEMORY * self._lead[rows] + gain.sum(dim=1)).clamp_(-most, most)
        self._lead.index_copy_(0, rows, lead)
        kinds = _kinds(self.room(rows.shape[0]).scales)
        self._usual.scatter_reduce_(0, kinds, lead, "mean")


def _kinds(temperatures: Tensor) -> Tensor:
    return (temperatures * 8).long().clamp_(max=KINDS - 1)


def _is_drawn_by_kernels(batch: Any) -> bool:
    """Tell whether every request draws from all tokens or from few, by top_k and top_p, and without
    a seed."""
    info = batch.sampling_info
    return not (
        info.is_all_greedy
        or is_adjusted(batch)
        or info.sampling_seed is not None
        or info.need_min_p_sampling
        or any(info.return_sampling_masks or ())
    ) and all(_is_few_or_all(req.sampling_params) for req in batch.reqs)


def _is_few_or_all(params: Any) -> bool:
    return params.top_k <= MAX_TOP_K or (params.top_k >= TOP_K_ALL and params.top_p == 1.0)
