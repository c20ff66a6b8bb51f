"""Oracle checkpoints: weights survive the round trip, configs are read in every spelling."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.reference.model import FULL, Drafter, DrafterConfig
from tests.oracle_drafter import CONFIG, make_drafter


def test_saved_drafter_loads_to_the_same_numbers(tmp_path):
    """If this broke, a trained drafter could not be handed to a server."""
    drafter = make_drafter().to(torch.bfloat16)
    drafter.save_pretrained(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path, torch.bfloat16)
    assert loaded.config == drafter.config
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_model_prefix_in_weight_names_is_accepted(tmp_path):
    """If this broke, some released checkpoints would not load."""
    drafter = make_drafter()
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"model.{k}": v for k, v in load_file(file).items()}, file)
    assert Drafter.from_pretrained(tmp_path).config == drafter.config


RAW = CONFIG.to_json()


@pytest.mark.parametrize(
    "changes,field,value",
    [
        ({"layer_types": None}, "layer_types", (FULL, FULL)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta", 5e5),
        ({"rope_theta": 1e6}, "rope_theta", 1e6),
        (
            {"block_size": None, "dflash_config": {**RAW["dflash_config"], "block_size": 4}},
            "block_size",
            4,
        ),
        ({"head_dim": None, "num_attention_heads": 2}, "head_dim", 16),
    ],
    ids=["no layer types", "nested theta", "top theta", "nested block size", "no head dim"],
)
def test_config_reads_every_released_spelling(changes, field, value):
    """If this broke, a released drafter would silently load with a wrong default."""
    raw = json.loads(json.dumps({**RAW, **changes}))
    assert getattr(DrafterConfig.from_json(raw), field) == value


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"layer_types": [FULL]}, "names 1 layers but num_hidden_layers is 2"),
        ({"layer_types": [FULL, "chunked"]}, "chunked"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"dflash_config": {**RAW["dflash_config"], "target_layer_ids": [0, 3]}}, "0..2"),
        ({"dflash_config": {**RAW["dflash_config"], "block_size": 4}}, "block_size is 8"),
        ({"dflash_config": {**RAW["dflash_config"], "selector_rank": 256}}, "selector_rank"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": 0.7}}, "with mscale"),
    ],
)
def test_config_refuses_what_the_oracle_does_not_compute(changes, message):
    """If this broke, the oracle would give wrong answers instead of none."""
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_json({**RAW, **changes})
