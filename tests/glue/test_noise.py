"""Which drafts are verified: what one step said is forgotten, whatever it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dflash.glue.noise import StepNoise

BLOCK = 4
ROWS = torch.tensor([0, 1])
LENS = torch.tensor([BLOCK, BLOCK])


def make_noise(temperature: float = 1.0) -> StepNoise:
    """Noise of two requests of one temperature, and room for a third."""
    noise = StepNoise(3, BLOCK, "cpu")
    noise.room(2).scales.fill_(temperature)
    noise.start(ROWS, torch.full([2], temperature))
    return noise


def gains(*by_request: float) -> Tensor:
    return torch.tensor(by_request)[:, None].expand(-1, BLOCK - 1).clone()


def is_drawn(noise: StepNoise, rows: Tensor = ROWS) -> list[bool]:
    nothing = torch.zeros(2, len(rows), BLOCK - 1, dtype=torch.int64)
    return noise.offer(rows, noise.room(len(rows)), drafts=nothing, logits=None).is_drawn.tolist()


def begin_third(noise: StepNoise) -> list[bool]:
    third = torch.tensor([2])
    noise.start(third, torch.ones(1))
    return is_drawn(noise, third)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_gain_that_is_no_number_says_nothing(odd: float) -> None:
    noise = make_noise()
    gain = gains(0.25, 0.25)
    gain[0, 1] = odd
    noise.learn(ROWS, gain, lens=LENS)
    assert is_drawn(noise) == [True, True] and begin_third(noise) == [True]
    # beyond the committed tokens it must not count either
    noise.learn(ROWS, gains(odd, 0.25), lens=torch.tensor([0, BLOCK]))
    assert is_drawn(noise) == [True, True] and begin_third(noise) == [True]
    for _ in range(5):
        noise.learn(ROWS, gains(-0.5, -0.5), lens=LENS)
    assert is_drawn(noise) == [False, False] and begin_third(noise) == [False]


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_remembered_stays_within_what_fifty_steps_can_say(sign: int) -> None:
    noise = make_noise()
    noise.learn(ROWS, gains(sign * 1e30, sign * 1e30), lens=LENS)
    assert is_drawn(noise) == [sign > 0, sign > 0]
    for _ in range(50):
        noise.learn(ROWS, gains(-sign, -sign), lens=LENS)
    assert is_drawn(noise) == [sign < 0, sign < 0]
    for _ in range(50):
        noise.learn(ROWS, gains(-sign, -sign), lens=LENS)
    assert begin_third(noise) == [sign < 0]
