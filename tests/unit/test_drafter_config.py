"""What a drafter's config may hold: released drafters pass, anything else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from sglang_dflash.config import DrafterSpec
from sglang_dflash.drafter_config import FULL, SLIDING, refuse_unknown
from sglang_dflash.reference import DrafterConfig
from sglang_dflash.testing.server import ROOT

RELEASED = sorted(
    path
    for folder in ("benchmarks/shapes", "sglang_dflash/pairs")
    for path in (ROOT / folder).rglob("config.json")
    if "dflash_config" in path.read_text()
)
# as in z-lab's Qwen3 drafters
PLAIN: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "layer_types": [FULL, FULL],
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
WINDOWS = {"layer_types": [SLIDING, SLIDING], "sliding_window": 2048}
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 2048}


def plain(*, dflash: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**PLAIN, **changes, "dflash_config": {**PLAIN["dflash_config"], **(dflash or {})}}


def test_there_are_released_configs_to_look_at() -> None:
    assert len(RELEASED) >= 8


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.parent.name)
def test_a_released_drafter_is_read_by_server_and_oracle(path: Any) -> None:
    raw = json.loads(path.read_text())
    spec = DrafterSpec.from_config(raw, name=str(path))
    assert DrafterConfig.from_json(raw).target_layer_ids == spec.target_layer_ids


@pytest.mark.parametrize("kind", [Qwen3Config, Qwen2Config, LlamaConfig])
def test_what_transformers_adds_to_a_config_is_understood(kind: type[PreTrainedConfig]) -> None:
    """The server reads a config that transformers has filled in with its own defaults."""
    changes = {key: value for key, value in PLAIN.items() if key != "model_type"}
    refuse_unknown(kind(**changes).to_dict(), name="drafter")


@pytest.mark.parametrize(
    "config",
    [
        plain(is_causal=False),
        plain(is_causal=True, **WINDOWS),
        plain(is_causal=False, **WINDOWS),
        plain(is_causal=False, **MIXED),
        plain(dflash={"causal": False}),
        plain(dflash={"sliding_window_non_causal": True}, **MIXED),
        plain(draft_vocab_size=32000),
        plain(sample_from_anchor=True),
        plain(dflash={"use_swa": False, "sample_from_anchor": None}),
        plain(dflash={"projector_type": "dflash", "attention_mode": "gqa"}),
        plain(dflash={"mask_token": "<|MASK|>", "block_size": 16, "num_target_layers": 36}),
        plain(dflash={"swa_window_size": 2048}, **WINDOWS),
        plain(mask_token_id=151669, draft_vocab_size=151936),
        plain(context_len=40960, v_head_dim=128, swa_head_dim=128, swa_v_head_dim=128),
        plain(some_new_feature=False, another=None, list_of_more=[]),
    ],
)
def test_a_value_that_means_what_is_computed_passes(config: dict[str, Any]) -> None:
    DrafterSpec.from_config(config, name="drafter")
    DrafterConfig.from_json(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            plain(architectures=["DFlash2BeamDraftModel"]),
            "architectures ['DFlash2BeamDraftModel']",
        ),
        (
            plain(architectures=["DFlash2DraftModel"], sample_from_anchor=True),
            "sample_from_anchor True",
        ),
        (
            plain(architectures=["DFlash2DraftModel"], draft_vocab_size=32000),
            "draft_vocab_size 32000",
        ),
        (
            plain(architectures=["DFlash2DraftModel"], dflash={"input_embedding_scale": 2.0}),
            "dflash_config.input_embedding_scale 2.0",
        ),
        (
            plain(architectures=["DFlashLagunaForCausalLM"], gating="per-head"),
            "architectures ['DFlashLagunaForCausalLM'], gating 'per-head'",
        ),
        (plain(is_causal=True), "is_causal True"),
        (
            plain(is_causal=True, dflash={"sliding_window_non_causal": True}, **WINDOWS),
            "is_causal True",
        ),
        (plain(is_causal=True, **MIXED), "is_causal True"),
        (plain(dflash={"causal": True}), "dflash_config.causal True"),
        (plain(use_swa=True), "use_swa True"),
        (plain(dflash={"use_swa": True}), "dflash_config.use_swa True"),
        (plain(dflash={"selector_rank": 256}), "dflash_config.selector_rank 256"),
        (plain(dflash={"conv_kernel_size": 2}), "dflash_config.conv_kernel_size 2"),
        (plain(dflash={"projector_type": "domino"}), "dflash_config.projector_type 'domino'"),
        (plain(dflash={"attention_mode": "mla"}), "dflash_config.attention_mode 'mla'"),
        (plain(dflash={"swa_window_size": 64}, **WINDOWS), "dflash_config.swa_window_size 64"),
        (plain(mlp_bias=True, hidden_act="gelu"), "hidden_act 'gelu', mlp_bias True"),
        (plain(num_experts=8), "num_experts 8"),
        (plain(num_local_experts=8), "num_local_experts 8"),
        (plain(mask_token_id=5), "mask_token_id 5"),
        (plain(v_head_dim=64), "v_head_dim 64"),
        (plain(use_qk_norm=False), "use_qk_norm False"),
        (plain(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (
            plain(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5}),
            "rope_parameters.partial_rotary_factor 0.5",
        ),
        (plain(quantization_config={"quant_method": "fp8"}), "quantization_config {'quant_method'"),
        (plain(transformer_layer_config={"key": "x" * 99}), "transformer_layer_config {'key': 'x"),
    ],
)
def test_anything_else_is_refused_by_server_and_oracle(config: dict[str, Any], named: str) -> None:
    """If ignored, it would silently cost accept length."""
    for read in (DrafterConfig.from_json, DrafterSpec.from_config):
        with pytest.raises(ValueError) as refused:
            read(config, name="some/drafter")
        assert (
            f"drafter some/drafter asks for settings that sglang_dflash does not support: {named}"
            in str(refused.value)
        )
        assert len(str(refused.value)) < 400


def test_the_server_needs_an_architecture_and_the_oracle_none() -> None:
    config = plain(architectures=None)
    DrafterConfig.from_json(config)
    with pytest.raises(ValueError, match=r'Add "architectures": \["DFlashDraftModel"\]'):
        DrafterSpec.from_config(config, name="drafter")


def speculators(**changes: Any) -> dict[str, Any]:
    layers = {key: PLAIN[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")}
    return {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 10],
        "block_size": 16,
        "mask_token_id": 3,
        "transformer_layer_config": {**layers, **(changes.pop("layers", {}))},
        **changes,
    }


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ([], "holds [], not an object"),
        (None, "holds None, not an object"),
        ({**PLAIN, "dflash_config": "x"}, "dflash_config is 'x', not an object"),
        (
            plain(dflash={"target_layer_ids": 5}),
            "dflash_config.target_layer_ids is 5, not a list of whole numbers",
        ),
        (
            plain(dflash={"target_layer_ids": [1, "6"]}),
            "dflash_config.target_layer_ids is [1, '6'], not a list of whole numbers",
        ),
        (plain(dflash={"mask_token_id": "3"}), "dflash_config.mask_token_id is '3', not a whole"),
        (plain(dflash={"mask_token_id": -1}), "mask_token_id is -1, not a whole number of 0 or"),
        (plain(dflash={"block_size": 0}), "dflash_config.block_size is 0"),
        (plain(block_size=0), "block_size is 0, not a whole number of 2 or more"),
        (plain(block_size=1), "block_size is 1, not a whole number of 2 or more"),
        (plain(block_size=True), "block_size is True"),
        (plain(num_attention_heads=0), "num_attention_heads is 0, not a whole number of 1 or more"),
        (plain(num_key_value_heads=0), "num_key_value_heads is 0"),
        (plain(hidden_size="128"), "hidden_size is '128', not a whole number of 1 or more"),
        (plain(num_hidden_layers="two"), "num_hidden_layers is 'two'"),
        (plain(layer_types=5), "layer_types is 5, not a list of words"),
        (plain(architectures="DFlashDraftModel"), "architectures is 'DFlashDraftModel', not a"),
        (plain(rope_scaling="yarn"), "rope_scaling is 'yarn', not an object"),
        (plain(rope_parameters={"rope_theta": 0}), "rope_parameters.rope_theta is 0, not a number"),
        (plain(rms_norm_eps=float("nan")), "rms_norm_eps is nan, not a number of more than 0"),
        (
            plain(head_dim=64.0, vocab_size=-1),
            "head_dim is 64.0, not a whole number of 1 or more; ",
        ),
        (plain(num_key_value_heads=5), "32 num_attention_heads cannot share 5 num_key_value_heads"),
        (plain(head_dim=7), "its heads have 7 values, not a multiple of 2"),
        (speculators(aux_hidden_state_layer_ids=5), "aux_hidden_state_layer_ids is 5, not a list"),
        (speculators(transformer_layer_config="x"), "transformer_layer_config is 'x', not an"),
        (speculators(layers={"hidden_size": "9"}), "transformer_layer_config.hidden_size is '9'"),
        (speculators(speculators_config={"verifier": "x"}), "speculators_config.verifier is 'x'"),
        (speculators(speculators_model_type=["dflash"]), "speculators_model_type is ['dflash']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_config_can_hold_is_refused_where_it_is_read(config: Any, named: str) -> None:
    """By server, doctor and converter alike; later it would be a traceback, or another network."""
    with pytest.raises(ValueError) as refused:
        DrafterSpec.from_config(config, name="some/drafter")
    assert "The config.json of the drafter some/drafter " in str(refused.value)
    assert named in str(refused.value)
    assert str(refused.value).endswith(("Correct it, or download it again.", "drafter's folder."))


def test_every_value_of_another_kind_is_listed() -> None:
    with pytest.raises(ValueError, match="hidden_size is '1'.*dflash_config.mask_token_id is '3'"):
        DrafterSpec.from_config(plain(hidden_size="1", dflash={"mask_token_id": "3"}), name="one")
