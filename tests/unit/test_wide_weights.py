"""Random weights of quantised layers: as large as those of unquantised ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.plugins.wide_weights import GAIN, draw_weights

IN, OUT = 512, 256


class Quantised(nn.Module):
    """A linear layer with FP8 weights and a scale for each output channel."""

    input_size = IN

    def __init__(self) -> None:
        super().__init__()
        weight = torch.zeros(OUT, IN).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(torch.zeros(OUT, 1), requires_grad=False)


def drawn() -> Quantised:
    model = nn.ModuleDict({"proj": Quantised()})
    draw_weights(model)
    return model["proj"]  # type: ignore[return-value]


def test_fp8_weights_times_their_scales_are_as_wide_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server of such a target ended with an error: torch has no normal distribution in FP8."""
    monkeypatch.setenv("WIDE_WEIGHTS", "1")
    layer = drawn()
    width = (layer.weight.float() * layer.weight_scale).std() * IN**0.5
    assert width == pytest.approx(GAIN, rel=0.1)
    again = drawn()
    assert torch.equal(layer.weight.float(), again.weight.float())
