"""Buffers of a step: allocated once for the largest batch, then sliced."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.kernels import SCRATCH_SLOT, Noise
from sglang_dflash.types import BlockRows, DraftBlock, Randomness, SamplingPlan, SharedRows


class StepBuffers:
    """The blocks of the largest batch: those that are drafted, and those that are verified."""

    def __init__(self, max_requests: int, block_size: int, device: torch.device | str) -> None:
        self.verified = BlockBuffer(max_requests, block_size, device)
        # only if fewer columns are verified than drafted
        self.drafted = BlockBuffer(max_requests, block_size, device)
        self._shared = torch.zeros(4, max_requests * block_size, dtype=torch.int64, device=device)
        self.randomness = StepRandomness(max_requests, block_size, device)

    def shared(self, bounds: Tensor, num_rows: int) -> SharedRows:
        """Return views for rows with these bounds. The next step overwrites them."""
        token_ids, positions, slots, requests = self._shared[:, :num_rows]
        return SharedRows(token_ids, positions, slots, bounds, requests)


class BlockBuffer:
    """Blocks of any number of requests and columns, without gaps."""

    def __init__(self, max_requests: int, block_size: int, device: torch.device | str) -> None:
        self._max_requests = max_requests
        rows = (3, max_requests * block_size)
        self._token_ids, self._positions, self._slots = torch.zeros(
            rows, dtype=torch.int64, device=device
        )

    def block(self, num_requests: int, width: int) -> DraftBlock:
        """Return views for this batch. The next step overwrites them."""
        capacity = self._max_requests
        assert num_requests <= capacity, f"{num_requests} requests exceed the {capacity} planned"
        shape = (num_requests, width)
        rows = num_requests * width
        return DraftBlock(
            token_ids=self._token_ids[:rows].view(shape),
            positions=self._positions[:rows].view(shape),
            slots=self._slots[:rows].view(shape),
        )

    def rows(self, used: int, padded: int) -> BlockRows:
        """Return the first `padded` rows. Those after the `used` ones hold some token at some
        position, and write to the scratch slot."""
        if padded > used:
            self._slots[used:padded] = SCRATCH_SLOT
        return BlockRows(self._token_ids[:padded], self._positions[:padded], self._slots[:padded])


class StepRandomness:
    """The random numbers of the largest batch, at fixed addresses that draft graphs read.

    A row's Gumbel noise depends only on its key. Drafts are sampled with it (Gumbel-max), and so
    are the target's own tokens with top_k and top_p: shared noise makes the two agree more often.
    It is redrawn every step, so the target's tokens are exact draws whatever was drafted.
    """

    def __init__(self, max_requests: int, block_size: int, device: torch.device | str) -> None:
        keys = torch.zeros(max_requests, block_size, dtype=torch.int64, device=device)
        self._noise = Noise(keys, torch.zeros(max_requests, device=device))
        self._uniforms = torch.zeros(max_requests, block_size - 1, device=device)
        self._on = False

    def for_batch(self, num_requests: int) -> Noise:
        """Return the noise that a graph of this batch size reads; scales are 0 without sampling."""
        return Noise(*(each[:num_requests] for each in self._noise))

    def draw(self, plan: SamplingPlan | None) -> Randomness | None:
        """Draw a step's random numbers. Without a plan, zero the scales: graphs sample nothing."""
        if plan is None:
            if self._on:
                self._noise.scales.zero_()
            self._on = False
            return None
        self._on = True
        size = plan.top_ks.shape[0]
        keys, scales = self.for_batch(size)
        keys.random_()
        uniforms = self._uniforms[:size].uniform_()
        scales.copy_(torch.where(plan.top_ks == 1, 0.0, plan.temperatures))
        return Randomness(keys, scales, uniforms)
