"""Verify attention with the tiles of every kind of card, against its torch twin."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, hold_in_the_interpreter, runs_kernel
from tests.kernels.test_verify_attention import Case, assert_matches_twin, build, make_problem

if INTERPRETED or torch.cuda.is_available():
    from sglang_dflash.kernels import cards
    from sglang_dflash.kernels.attention.tiles import choose_tiles
    from sglang_dflash.kernels.cards import Card


@runs_kernel
@pytest.mark.parametrize(
    ("capability", "dim"),
    [((8, 9), 64), ((8, 9), 128), ((8, 9), 256), ((8, 9), 512), ((8, 0), 512)],
    ids=str,
)
def test_tiles_of_other_cards_match_the_twin(capability: tuple[int, int], dim: int) -> None:
    """The one kernel has to be right with fewer rows to a tile, and without narrow launches."""
    case = Case(
        dtype=torch.bfloat16,
        lens=(40, 0, 9),
        rows=16,
        widths=(16, 2, 5),
        padding=3,
        kv_heads=1,
        d=dim,
        dv=dim,
        window=24 if dim == 256 else -1,
    )
    tiles = choose_tiles(Card(capability), case.dtype)
    if tiles.wide[dim].shared_memory > cards.current().shared_memory:
        pytest.skip("this card has too little shared memory for the tile")
    attention = build(case, max_requests=8, card_tiles=tiles)
    assert_matches_twin(attention, make_problem(case))


if not INTERPRETED:

    def test_the_tiles_hold_in_the_interpreter() -> None:
        hold_in_the_interpreter(__file__)
