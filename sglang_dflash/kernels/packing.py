"""Rows that requests share, packed without gaps, in torch.

Of N rows, request r has rows bounds[r] up to bounds[r + 1], at least one; bounds [b + 1] int64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_rows_of(bounds: Tensor) -> Tensor:
    """Return how many rows each request has, [b]."""
    return bounds[1:] - bounds[:-1]


def unpack(rows: Tensor, bounds: Tensor, width: int) -> Tensor:
    """Return packed rows [N, ...] by request and column, [b, width, ...]; where a request has fewer
    rows than columns, its last is repeated."""
    columns = torch.arange(width, device=bounds.device)
    return rows[torch.minimum(bounds[:-1, None] + columns, bounds[1:, None] - 1)]


def places(bounds: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the request and the column of each packed row, [N] each."""
    rows = torch.arange(num_rows, device=bounds.device)
    requests = torch.searchsorted(bounds, rows, right=True) - 1
    return requests, rows - bounds[requests]
