"""Which weights of a drafter are FP8, and which cards can serve them."""

from __future__ import annotations

import json

import pytest

from sglang_dflash.config import DrafterSpec
from sglang_dflash.fp8_drafter import check, describe, is_quantised
from sglang_dflash.testing.server import ROOT

SHAPES = ROOT / "benchmarks" / "shapes"
DRAFTERS = {folder.name: folder for folder in sorted(SHAPES.glob("*-draft"))}
DRAFTERS["smollm2_dflash"] = ROOT / "sglang_dflash" / "pairs" / "smollm2_dflash"
AMPERE, ADA = (8, 6), (8, 9)


def spec(name: str) -> DrafterSpec:
    config = json.loads((DRAFTERS[name] / "config.json").read_text())
    return DrafterSpec.from_config(config, name=name)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_cards_with_fp8_arithmetic_serve_every_drafter(name: str, tp_size: int) -> None:
    for capability in (ADA, (9, 0), (12, 0)):
        check(spec(name), capability=capability, is_fp32=False, tp_size=tp_size)


# by drafter: the projection without a tile of Marlin's on Ampere, and over how many ranks
WITHOUT_TILE = {
    ("smollm2_dflash", 1): "o_proj of 576 x 576",
    ("gpt-oss-20b-draft", 8): "down_proj of 960 x 2880",
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("tp_size", [1, 8])
def test_marlin_serves_what_its_tiles_divide(name: str, tp_size: int) -> None:
    """It would end the server after both models were loaded."""
    problem = WITHOUT_TILE.get((name, tp_size))
    if name == "smollm2_dflash":
        # three KV heads: every rank holds the whole drafter
        problem = WITHOUT_TILE[name, 1]
    if problem is None:
        check(spec(name), capability=AMPERE, is_fp32=False, tp_size=tp_size)
        return
    with pytest.raises(ValueError, match=f"has no tile for the drafter's {problem} on each rank"):
        check(spec(name), capability=AMPERE, is_fp32=False, tp_size=tp_size)


def test_fp32_and_older_cards_are_refused() -> None:
    drafter = spec("qwen3-8b-draft")
    with pytest.raises(ValueError, match="needs a target in bf16 or fp16, and this one is fp32"):
        check(drafter, capability=ADA, is_fp32=True, tp_size=1)
    with pytest.raises(ValueError, match=r"needs compute capability 8.0 or later, .* has 7.5"):
        check(drafter, capability=(7, 5), is_fp32=False, tp_size=1)


@pytest.mark.parametrize(
    ("name", "has_bias"), [("qwen3-8b-draft", False), ("gpt-oss-20b-draft", True)]
)
def test_output_projections_with_a_bias_stay_as_released(name: str, has_bias: bool) -> None:
    drafter = spec(name)
    assert drafter.has_bias == has_bias
    assert is_quantised(drafter, "layers.0.self_attn.o_proj.weight") != has_bias
    assert ("output projections" in describe(drafter)) != has_bias
    assert is_quantised(drafter, "layers.0.mlp.down_proj.weight")
    for other in ("self_attn.q_proj.weight", "self_attn.o_proj.bias", "mlp_conv.weight"):
        assert not is_quantised(drafter, f"layers.0.{other}")
