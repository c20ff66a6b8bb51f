"""Memory a step writes into: allocated once for the largest batch, sliced for ever."""

from __future__ import annotations

import torch

from sglang_dflash.types import DraftBlock


class StepBuffers:
    """Hold the block of the largest batch, so that captured graphs see fixed addresses."""

    def __init__(self, max_requests: int, block_size: int, device: torch.device | str) -> None:
        shape = (max_requests, block_size)
        self._token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self._slots = torch.zeros(shape, dtype=torch.int64, device=device)

    def block(self, num_requests: int) -> DraftBlock:
        """Return views for this batch. The next step overwrites them."""
        capacity = self._token_ids.shape[0]
        assert num_requests <= capacity, f"{num_requests} requests exceed the {capacity} planned"
        return DraftBlock(
            token_ids=self._token_ids[:num_requests],
            positions=self._positions[:num_requests],
            slots=self._slots[:num_requests],
        )
