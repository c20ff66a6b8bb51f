"""FP8 weights of the drafter: when they are asked for, and which layers get them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from sglang_dflash.kernels import cards
from sglang_dflash.kernels.cards import Card
from sglang_dflash.pairs import tiny_drafter
from tests.glue.test_draft_model import build, checkpoint
from tests.glue.test_server_args import ON_GPU, changed_drafter, parse


def test_the_drafter_is_not_quantised_with_its_target(models: Path) -> None:
    args = parse(models, "--quantization", "fp8")
    assert (args.quantization, args.speculative_draft_model_quantization) == ("fp8", None)
    with pytest.raises(ValueError, match="not support --speculative-draft-model-quantization awq"):
        parse(models, "--speculative-draft-model-quantization", "awq")


def test_fp8_weights_of_the_drafter_are_kept_where_they_can_run(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = ("--speculative-draft-model-quantization", "fp8")
    with pytest.raises(ValueError, match="quantization fp8 needs a GPU. Drop it."):
        parse(models, *asked)
    monkeypatch.setattr(cards, "current", lambda: Card((9, 0)))
    found = parse(models, *ON_GPU, *asked)
    assert (found.quantization, found.speculative_draft_model_quantization) == (None, "fp8")
    with pytest.raises(ValueError, match="and this one is fp32. Drop it."):
        parse(models, *ON_GPU, "--dtype", "float32", *asked)
    monkeypatch.setattr(cards, "current", lambda: Card((8, 6)))
    odd = changed_drafter(models, tmp_path / "odd", intermediate_size=272)
    with pytest.raises(ValueError, match="Marlin, .* has no tile for the drafter's gate_up_proj"):
        parse(models, *ON_GPU, *asked, drafter=odd)


def test_projections_of_the_context_are_never_quantised() -> None:
    """K and V of target tokens are projected with these weights outside the layers."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    model = build(1, 0, quantisation=Fp8Config())
    model.load_weights(checkpoint().items())
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for each in (attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            assert isinstance(each.quant_method, Fp8LinearMethod)
        assert not isinstance(attention.qkv_proj.quant_method, Fp8LinearMethod)
        assert attention.kv_weight.shape == (2 * attention.kv_size, model.spec.hidden_size)


def test_output_projections_with_a_bias_are_not_quantised() -> None:
    """SGLang 0.5.17 adds a permuted bias to them where Marlin multiplies."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    config = AutoConfig.from_pretrained(tiny_drafter())
    config.attention_bias = True
    for layer in build(1, 0, config, quantisation=Fp8Config()).layers:
        assert not isinstance(layer.self_attn.o_proj.quant_method, Fp8LinearMethod)
        assert isinstance(layer.mlp.down_proj.quant_method, Fp8LinearMethod)
