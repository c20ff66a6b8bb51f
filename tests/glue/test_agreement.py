"""What the ranks compare of a step, and how a difference is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.glue.step.agreement import Comparison, difference
from sglang_dflash.types import Commit, DraftContext, RowShare
from sglang_dflash.width import Choice

CONTEXT = DraftContext(
    anchors=torch.tensor([5, 6]), lens=torch.tensor([9, 4]), request_rows=torch.tensor([1, 2])
)
COMMIT = Commit(
    lens=torch.tensor([2, 1]),
    token_ids=torch.tensor([[7, 8], [9, 0]]),
    bonus=torch.tensor([8, 9]),
    new_lens=torch.tensor([11, 5]),
    slots=torch.tensor([[3, 4], [6, 0]]),
    bounds=torch.tensor([0, 2, 3]),
)
SHARE = RowShare(3, offsets=torch.zeros(1), slopes=torch.ones(1))


class Group:
    """This rank, and another that sends what this one does, but for some of it."""

    world_size = 2

    def __init__(self, **others: Any) -> None:
        self.others = {name.replace("_", " "): value for name, value in others.items()}
        self.sent: list[dict[str, Any]] = []

    def all_gather_object(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        self.sent.append(own)
        return [own, {name: self.others.get(name, value) for name, value in own.items()}]


def refuse(sentence: str) -> None:
    raise RuntimeError(sentence)


def run(comparison: Comparison) -> None:
    comparison.begin(lambda: ["a", "b"], CONTEXT, Choice(2), SHARE)
    comparison.finish(COMMIT)


def test_everything_that_ranks_could_disagree_on_is_compared() -> None:
    group = Group()
    comparison = Comparison(group, is_on=True, end=refuse)
    run(comparison)
    run(comparison)
    assert comparison.steps == 2
    begun, done = group.sent[:2]
    assert begun["list of requests"] == ["a", "b"]
    assert (begun["verify width"], begun["number of shared rows"]) == (2, 3)
    assert begun["anchor of request b"] == 6 and begun["length of request a"] == 9
    assert done["list of committed tokens of request a"] == [7, 8]
    assert done["committed length of request b"] == 1 and done["width of request a"] == 2
    assert done["bonus token of request b"] == 9 and done["new length of request a"] == 11


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"verify_width": 3}, "the verify width is 2 on rank 0 and 3 on rank 1"),
        ({"width_of_request_b": 4}, "the width of request b is 1 on rank 0 and 4 on rank 1"),
        ({"bonus_token_of_request_a": 1}, "the bonus token of request a is 8 on rank 0 and 1 on"),
    ],
    ids=["width", "share", "token"],
)
def test_a_difference_names_step_request_and_rank(other: dict[str, Any], told: str) -> None:
    group = Group()
    comparison = Comparison(group, is_on=True, end=refuse)
    run(comparison)
    group.others = {name.replace("_", " "): value for name, value in other.items()}
    with pytest.raises(RuntimeError, match=f"The ranks of this server parted in step 2: {told}"):
        run(comparison)


def test_the_rank_that_differs_is_named() -> None:
    assert difference([{"x": 1}, {"x": 1}, {"x": 2}]) == "the x is 1 on rank 0 and 2 on rank 2"
    assert difference([{"x": 1}, {"x": 1}]) is None


@pytest.mark.parametrize(("is_on", "ranks"), [(False, 2), (True, 1)], ids=["off", "one rank"])
def test_nothing_is_looked_at_otherwise(is_on: bool, ranks: int) -> None:
    """Reading a tensor would wait for the GPU in every step."""
    group: Any = SimpleNamespace(world_size=ranks)
    comparison = Comparison(group, is_on=is_on, end=refuse)
    comparison.begin(lambda: pytest.fail("requests were asked for"), CONTEXT, Choice(2), None)
    comparison.finish(COMMIT)
    assert comparison.steps == 0
