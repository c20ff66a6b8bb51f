"""What a quantised target weighs, counted by hand for small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_dflash.commands.quantised_weights import quantised, read_scheme

IN, OUT = 256, 512
BF16 = IN * OUT * 2
VALUES = IN * OUT


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(4, 2 * OUT, IN))
        self.down_proj = torch.nn.Parameter(torch.empty(4, IN, OUT))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(IN, OUT, bias=True)
        self.norm = torch.nn.LayerNorm(IN)
        self.experts = Experts()


class Model(torch.nn.Module):
    """One layer, a tower for images, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(1000, IN)
        self.layers = torch.nn.ModuleList([Layer()])
        self.vision_tower = torch.nn.ModuleDict({"linear": torch.nn.Linear(IN, OUT, bias=False)})
        self.lm_head = torch.nn.Linear(IN, 1000, bias=False)


def compressed(group_size: int | None = 32, ignore: tuple[str, ...] = (), **weights: Any) -> Any:
    group = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": group_size, **weights}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": list(ignore),
    }


def sizes_of(config: dict[str, Any]) -> dict[str, int]:
    with torch.device("meta"):
        model = Model()
    sizes = {name: 2 * parameter.numel() for name, parameter in model.named_parameters()}
    found = quantised(sizes, model, config)
    assert found is not None and found.keys() == sizes.keys()
    return found


@pytest.mark.parametrize(
    ("config", "size"),
    [
        # 4 bits a value; a bf16 scale a group
        (compressed(32), VALUES // 2 + VALUES // 32 * 2),
        # and 4 bits of zero point a group
        (compressed(32, symmetric=False), VALUES // 2 + VALUES // 32 * 2 + VALUES // 64),
        (compressed(None, num_bits=8), VALUES),
        (compressed(None, num_bits=8, type="float"), VALUES),
        # one byte of scale for 16 values
        (compressed(16, type="float"), VALUES // 2 + VALUES // 16),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
            VALUES // 2 + VALUES // 128 * 2 + VALUES // 256,
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
            VALUES // 2 + VALUES // 128 * 2,
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, VALUES),
        ({"quant_method": "fp8"}, VALUES),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, VALUES // 2 + VALUES // 16),
        ({"quant_method": "mxfp4"}, BF16),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_matrix_takes_its_bits_and_the_scales_of_its_groups(
    config: dict[str, Any], size: int
) -> None:
    assert sizes_of(config)["layers.0.q_proj.weight"] == size


def test_embeddings_norms_biases_and_head_stay_in_bf16() -> None:
    """A quantised head cannot be shared with the drafter, and is refused."""
    found = sizes_of(compressed())
    assert found["embed_tokens.weight"] == found["lm_head.weight"] == 1000 * IN * 2
    assert found["layers.0.norm.weight"] == IN * 2
    assert found["layers.0.q_proj.bias"] == OUT * 2


def test_experts_are_counted_too_and_alone_in_mxfp4() -> None:
    four = 4 * 2 * OUT * IN
    assert sizes_of(compressed())["layers.0.experts.gate_up_proj"] == four * 9 // 16
    mxfp4 = sizes_of({"quant_method": "mxfp4"})
    assert mxfp4["layers.0.experts.gate_up_proj"] == four * 17 // 32
    assert mxfp4["vision_tower.linear.weight"] == BF16


@pytest.mark.parametrize(
    "ignored",
    [
        compressed(ignore=("vision_tower.linear",)),
        compressed(ignore=("re:.*vision_tower.*",)),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["vision_tower*"]},
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["vision_tower"],
        },
    ],
    ids=["name", "expression", "pattern", "part"],
)
def test_layers_that_the_config_leaves_out_stay_in_bf16(ignored: dict[str, Any]) -> None:
    found = sizes_of(ignored)
    assert found["vision_tower.linear.weight"] == BF16
    assert found["layers.0.q_proj.weight"] < BF16 / 3


def test_a_name_does_not_leave_out_others_that_begin_like_it() -> None:
    """layers.1 is not layers.10."""
    found = sizes_of(compressed(ignore=("layers.0.q", "tower.linear.weight.more")))
    assert found["layers.0.q_proj.weight"] < BF16 / 3


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
    ids=lambda config: config["quant_method"],
)
def test_other_schemes_are_said_to_be_unknown(config: dict[str, Any]) -> None:
    assert read_scheme(config) is None
