"""Which layers of a Gemma 4 are fused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.glue import compat, seams
from sglang_dflash.glue.models import gemma4_layers
from sglang_dflash.kernels import TORCH


class Gemma4DecoderLayer(torch.nn.Module):
    """A layer without per-layer embeddings and shared KV, of linear modules that are given."""

    has_ple = False

    def __init__(self, **linears: torch.nn.Module) -> None:
        super().__init__()
        for part in ("self_attn", "mlp"):
            self.add_module(part, torch.nn.Module())
        attention: Any = self.self_attn
        attention.is_kv_shared_layer = False
        attention.q_norm = attention.k_norm = SimpleNamespace(scale_shift=0.0)
        attention.v_norm = SimpleNamespace(with_scale=False)
        for path in gemma4_layers.PRODUCTS:
            part, _, name = path.partition(".")
            self.get_submodule(part).add_module(name, linears.get(name, linear()))


def linear(method: str = "UnquantizedLinearMethod") -> torch.nn.Module:
    found = torch.nn.Linear(8, 8, bias=False)
    found.quant_method = type(method, (), {})()
    return found


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "ranks_of", lambda linear: 1)


def why_not(**linears: torch.nn.Module) -> str | None:
    return gemma4_layers._why_not(Gemma4DecoderLayer(**linears), ranks=1)


def test_quantised_layers_are_fused() -> None:
    assert why_not() is None
    assert why_not(o_proj=linear("CompressedTensorsLinearMethod")) is None


def test_layers_with_lora_are_left_to_sglang() -> None:
    """What an adapter adds would be lost, and a wrapper lacks what else is asked of a module."""
    wrapped = compat.BaseLayerWithLoRA(linear(), lora_backend=None)
    assert not hasattr(wrapped, "quant_method")
    assert why_not(qkv_proj=wrapped) == "LoRA"


@pytest.mark.parametrize(
    ("method", "described"),
    [
        ("UnquantizedLinearMethod", {}),
        ("AWQLinearMethod", {"thin_linear": "sglang (where weights are quantised)"}),
    ],
)
def test_gemms_of_quantised_weights_are_described_as_sglangs(
    method: str, described: dict[str, str]
) -> None:
    model = torch.nn.ModuleList([Gemma4DecoderLayer(down_proj=linear(method))])
    found = gemma4_layers.describe_layers(f"sglang_dflash.{TORCH.name}", TORCH, model)
    assert found == described
