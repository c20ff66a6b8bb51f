"""Buffers of a step: allocated once for the largest batch, then sliced."""

from __future__ import annotations

import torch

from sglang_dflash.kernels import Noise
from sglang_dflash.types import DraftBlock, Randomness, SamplingPlan


class StepBuffers:
    """The block of the largest batch, at fixed addresses for captured CUDA graphs."""

    def __init__(self, max_requests: int, block_size: int, device: torch.device | str) -> None:
        shape = (max_requests, block_size)
        self._token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self._slots = torch.zeros(shape, dtype=torch.int64, device=device)
        self.randomness = StepRandomness(max_requests, block_size, device)

    def block(self, num_requests: int) -> DraftBlock:
        """Return views for this batch. The next step overwrites them."""
        capacity = self._token_ids.shape[0]
        assert num_requests <= capacity, f"{num_requests} requests exceed the {capacity} planned"
        return DraftBlock(
            token_ids=self._token_ids[:num_requests],
            positions=self._positions[:num_requests],
            slots=self._slots[:num_requests],
        )


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
        self._uniforms.uniform_()
        scales.copy_(torch.where(plan.top_ks == 1, 0.0, plan.temperatures))
        return Randomness(keys, scales, self._uniforms[:size])
