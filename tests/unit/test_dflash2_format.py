"""What the config of a DFlash2 drafter says: released ones are read, what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash import dflash2_format
from sglang_dflash.dflash2_format import DFlash2

DFLASH = {
    "block_size": 8,
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "mask_token_id": 248070,
    "selector_rank": 256,
    "selector_top_k": 16,
    "target_layer_ids": [5, 19, 33, 47, 61],
}
# as in the drafter for Qwen3.8-27B
QWEN: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": DFLASH,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 262144,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "vocab_size": 248320,
}
# beyond that in the one for Muse-Glimmer-30B
MUSE = {"final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404}


def read(**changes: Any) -> DFlash2 | None:
    config = {**QWEN, "dflash_config": {**DFLASH, **changes}}
    return dflash2_format.read(config, name="some/drafter", block_size=8)


def test_released_configs_are_read() -> None:
    plain = DFlash2(conv_taps=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
    assert read() == plain
    muse = read(**MUSE)
    assert muse is not None and (muse.output_multiplier, muse.logit_cap) == (
        MUSE["output_multiplier"],
        20.0,
    )
    assert read(final_logit_softcapping=None, output_multiplier=1) == plain
    assert DFLASH | plain.to_json() == DFLASH and MUSE.items() < muse.to_json().items()


def test_a_plain_drafter_has_none_of_it() -> None:
    config = {**QWEN, "architectures": ["DFlashDraftModel"]}
    assert dflash2_format.read(config, name="drafter", block_size=8) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"selector_rank": None}, "lacks dflash_config.selector_rank"),
        (
            {"conv_kernel_size": None, "conv_group_size": None},
            "lacks dflash_config.conv_kernel_size, dflash_config.conv_group_size",
        ),
        ({"selector_top_k": 0}, "selector_top_k 0 is not a positive whole number"),
        ({"selector_rank": "256"}, "selector_rank '256' is not a positive whole number"),
        ({"conv_kernel_size": True}, "conv_kernel_size True is not a positive whole number"),
        ({"conv_kernel_size": 9}, "conv_kernel_size 9 exceeds the block of 8"),
        ({"conv_group_size": 24}, "conv_group_size 24 does not divide hidden_size 5120"),
        ({"selector_top_k": 248321}, "selector_top_k 248321 exceeds vocab_size 248320"),
        ({"output_multiplier": 0}, "output_multiplier 0 is not positive"),
        ({"output_multiplier": "1"}, "output_multiplier '1' is not positive"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping -1.0 is not positive"),
    ],
)
def test_what_cannot_be_is_told(changes: dict[str, Any], named: str) -> None:
    """Otherwise loading the weights would fail, or a graph would."""
    with pytest.raises(ValueError, match="some/drafter") as refused:
        read(**changes)
    assert named in str(refused.value)
