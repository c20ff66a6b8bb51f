"""Which row's state a request's snapshot for the prefix cache holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.glue import seams
from sglang_dflash.glue.step.recurrent_states import RecurrentStates

INTERVAL = 32


def rows_of(lens: torch.Tensor, committed: torch.Tensor, batch: SimpleNamespace) -> torch.Tensor:
    commit = SimpleNamespace(lens=committed.int(), new_lens=lens + committed)
    found = RecurrentStates._snapshot_rows(batch, commit, committed - 1)
    assert found is not None
    return found


def test_a_snapshot_holds_a_multiple_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked by counting tokens: row k leaves the state of `lens + k + 1` of them."""
    monkeypatch.setattr(seams, "tokens_between_snapshots", lambda _batch: INTERVAL, raising=False)
    lens, committed = torch.cartesian_prod(torch.arange(1, 100), torch.arange(1, 17)).T
    batch = SimpleNamespace(mamba_track_indices=torch.zeros_like(lens))
    rows = rows_of(lens, committed, batch)
    for length, count, row in zip(lens.tolist(), committed.tolist(), rows.tolist(), strict=True):
        passed = [k for k in range(count) if (length + k + 1) % INTERVAL == 0]
        assert (passed == [row]) if passed else row < 0


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    batch = SimpleNamespace(mamba_track_indices=None)
    commit = SimpleNamespace(lens=torch.ones(1), new_lens=torch.ones(1))
    assert RecurrentStates._snapshot_rows(batch, commit, torch.zeros(1)) is None
