"""Which drafts are verified: the policy forgets any single step, whatever its value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dflash.policy import DraftPolicy
from sglang_dflash.types import DraftOutput, Randomness

BLOCK = 4
ROWS = torch.tensor([0, 1])
LENS = torch.tensor([BLOCK, BLOCK])


class OneTemperature:
    """The policy for two requests at temperature 1, with room for a third."""

    def __init__(self) -> None:
        self.policy = DraftPolicy(3, "cpu")
        self.policy.start(ROWS, torch.ones(2))

    def learn(self, advantage: Tensor, lens: Tensor = LENS) -> None:
        self.policy.learn(ROWS, advantage, temperatures=torch.ones(2), lens=lens)

    def is_sampled(self, rows: Tensor = ROWS) -> list[bool]:
        return select(self.policy, rows).is_sampled.tolist()

    def begin_third(self) -> list[bool]:
        third = torch.tensor([2])
        self.policy.start(third, torch.ones(1))
        return self.is_sampled(third)


def select(policy: DraftPolicy, rows: Tensor):
    argmax_drafts = torch.zeros(len(rows), BLOCK - 1, dtype=torch.int64)
    none = torch.zeros(len(rows))
    drafts = DraftOutput(argmax_drafts, argmax_drafts + 1)
    return policy.select(rows, drafts, Randomness(keys=none, scales=none, uniforms=none))


def advantages(*by_request: float) -> Tensor:
    return torch.tensor(by_request)[:, None].expand(-1, BLOCK - 1).clone()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_an_advantage_that_is_not_finite_says_nothing(odd: float) -> None:
    known = OneTemperature()
    advantage = advantages(0.25, 0.25)
    advantage[0, 1] = odd
    known.learn(advantage)
    assert known.is_sampled() == [True, True] and known.begin_third() == [True]
    # nor may it count beyond the committed tokens
    known.learn(advantages(odd, 0.25), torch.tensor([0, BLOCK]))
    assert known.is_sampled() == [True, True] and known.begin_third() == [True]
    for _ in range(5):
        known.learn(advantages(-0.5, -0.5))
    assert known.is_sampled() == [False, False] and known.begin_third() == [False]


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_remembered_stays_within_what_fifty_steps_can_say(sign: int) -> None:
    known = OneTemperature()
    known.learn(advantages(sign * 1e30, sign * 1e30))
    assert known.is_sampled() == [sign > 0, sign > 0]
    for _ in range(50):
        known.learn(advantages(-sign, -sign))
    assert known.is_sampled() == [sign < 0, sign < 0]
    for _ in range(50):
        known.learn(advantages(-sign, -sign))
    assert known.begin_third() == [sign < 0]


def test_each_request_verifies_the_kind_that_was_kept_more_often() -> None:
    known = OneTemperature()
    known.learn(advantages(0.5, -0.5))
    assert select(known.policy, ROWS).verified.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_rows_behind_the_commit_do_not_count() -> None:
    """Their choices are conditioned on drafts that were not committed."""
    known = OneTemperature()
    advantage = torch.tensor([[-0.1, 1.0, 1.0], [-0.1, 1.0, 1.0]])
    known.learn(advantage, torch.tensor([1, 2]))
    assert known.is_sampled() == [False, True]


def test_a_new_request_begins_as_others_of_its_temperature() -> None:
    policy = DraftPolicy(4, "cpu")
    temperatures = torch.tensor([0.3, 1.0])
    policy.start(ROWS, temperatures)
    for _ in range(3):
        policy.learn(ROWS, advantages(-0.5, 0.5), temperatures=temperatures, lens=LENS)
    new = torch.tensor([2, 3])
    # 0.26 and 0.3 share a bin of width 1/8; 2 and above share one, where nothing was learnt
    policy.start(new, torch.tensor([0.26, 7.0]))
    assert select(policy, new).is_sampled.tolist() == [False, True]


def test_a_temperature_without_bounds_falls_into_the_last_bin() -> None:
    """On a CPU it once overflowed to a negative bin, and one request ended the server."""
    policy = DraftPolicy(3, "cpu")
    policy.start(ROWS, torch.tensor([1e20, torch.inf]))
    assert select(policy, ROWS).is_sampled.tolist() == [True, True]
