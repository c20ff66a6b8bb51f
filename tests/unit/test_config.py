"""Every refusal names what was requested, what was found and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_dflash import config as cfg
from sglang_dflash.environment import Environment

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "vocab_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "block_size": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 3]},
}
TARGET = cfg.TargetSpec(
    name="target",
    architecture="LlamaForCausalLM",
    hidden_size=128,
    vocab_size=1024,
    num_layers=6,
    context_len=2048,
    delivers_last_layer=False,
)


def drafter(**changes: Any) -> cfg.DrafterSpec:
    return cfg.DrafterSpec.from_config({**CONFIG, **changes}, name="drafter")


def test_released_config_is_read() -> None:
    spec = drafter()
    assert spec.block_size == 16
    assert spec.mask_token_id == 4
    assert spec.target_layer_ids == (1, 3)
    assert [spec.window_left(0), spec.window_left(1)] == [63, -1]
    assert [spec.is_causal(0), spec.is_causal(1)] == [True, False]


def test_block_size_may_stand_in_dflash_config() -> None:
    spec = drafter(dflash_config={**CONFIG["dflash_config"], "block_size": 10})
    assert spec.block_size == 10


def test_layers_are_full_attention_unless_said_otherwise() -> None:
    assert drafter(layer_types=None).layer_types == ("full_attention",) * 2


def test_draft_kv_counts_both_tensors_of_every_layer_on_a_rank() -> None:
    assert drafter().kv_bytes_per_token(element_size=2, tp_size=1) == 2 * 2 * 2 * 32 * 2
    assert drafter().kv_bytes_per_token(element_size=2, tp_size=2) == 2 * 2 * 1 * 32 * 2
    # fewer heads than ranks: every rank holds one
    assert drafter().kv_bytes_per_token(element_size=2, tp_size=4) == 2 * 2 * 1 * 32 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"dflash_config": {"target_layer_ids": [1]}},
            "names no mask token.*Add the id",
            id="no mask token",
        ),
        pytest.param(
            {"dflash_config": {"mask_token_id": 4}},
            "does not name the target layers.*Add the layer ids",
            id="no layer ids",
        ),
        pytest.param({"hidden_size": None}, "is not a DFlash drafter.*hidden_size", id="no size"),
        pytest.param({"layer_types": ["full_attention"]}, "2 layers but 1", id="few types"),
        pytest.param(
            {"layer_types": ["full_attention", "chunked_attention"]},
            "of type chunked_attention",
            id="unknown type",
        ),
        pytest.param({"sliding_window": None}, "no sliding_window. Add", id="no window"),
    ],
)
def test_odd_drafter_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter(**changes)


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        pytest.param(
            {"hidden_size": 64}, {}, "hidden size 64.*has 128.*trained for this", id="hidden size"
        ),
        pytest.param({"vocab_size": 1000}, {}, "vocabulary of 1000.*of 1024", id="vocabulary"),
        pytest.param(
            {"dflash_config": {"mask_token_id": 1024, "target_layer_ids": [1]}},
            {},
            "mask token 1024.*outside the vocabulary of 1024",
            id="mask outside",
        ),
        pytest.param(
            {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 7]}},
            {},
            r"reads target layers \[7\].*\(6 layers\) delivers layers 0 to 4",
            id="layer beyond depth",
        ),
        pytest.param(
            {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 5]}},
            {},
            r"reads target layers \[5\]",
            id="last layer",
        ),
        pytest.param(
            {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [3, 1]}},
            {},
            "List them ascending",
            id="order",
        ),
    ],
)
def test_pair_that_does_not_fit_is_refused(
    changes: dict[str, Any], target: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cfg.check_pair(drafter(**changes), dataclasses.replace(TARGET, **target))


def test_pair_that_fits_passes() -> None:
    cfg.check_pair(drafter(), TARGET)
    last = drafter(dflash_config={"mask_token_id": 4, "target_layer_ids": [1, 5]})
    cfg.check_pair(last, dataclasses.replace(TARGET, delivers_last_layer=True))


def test_block_size_defaults_to_the_trained_one_and_is_bounded() -> None:
    assert cfg.resolve_block_size(drafter(), None) == 16
    assert cfg.resolve_block_size(drafter(), 2) == 2
    with pytest.raises(ValueError, match="17 exceeds the block size 16.*Pass 16 or less"):
        cfg.resolve_block_size(drafter(), 17)
    with pytest.raises(ValueError, match="1 leaves nothing to draft.*Pass 2 to 16"):
        cfg.resolve_block_size(drafter(), 1)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_with_another_number_of_features_are_refused(tmp_path: Path, prefix: str) -> None:
    save_file({f"{prefix}fc.weight": torch.zeros(128, 3 * 128)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"trained on 3 features.*names 2 target layers"):
        cfg.check_features(drafter(), tmp_path, target=TARGET)


@pytest.mark.parametrize("last", [0, 1])
def test_every_weight_file_must_be_whole(tmp_path: Path, last: int) -> None:
    """A truncated shard would fail the loading minutes later, without naming the file."""
    save_file({"fc.weight": torch.zeros(128, 2 * 128)}, tmp_path / "model-0.safetensors")
    save_file({"norm.weight": torch.zeros(128)}, tmp_path / "model-1.safetensors")
    cfg.check_features(drafter(), tmp_path, target=TARGET)
    cut = tmp_path / f"model-{last}.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"model-{last}.safetensors is not a complete.*cut short"):
        cfg.check_features(drafter(), tmp_path, target=TARGET)


def test_folder_without_weights_passes_for_dummy_loading(tmp_path: Path) -> None:
    cfg.check_features(drafter(), tmp_path, target=TARGET)


@pytest.mark.parametrize(
    ("environment", "disabled", "schedule", "reason"),
    [
        ({}, False, True, "on unless"),
        ({"SGLANG_ENABLE_SPEC_V2": "1", "SGLANG_ENABLE_DFLASH_SPEC_V2": "true"}, False, True, "on"),
        ({"SGLANG_ENABLE_SPEC_V2": "0"}, False, False, "SGLANG_ENABLE_SPEC_V2=0"),
        ({"SGLANG_ENABLE_DFLASH_SPEC_V2": "False"}, False, False, "SGLANG_ENABLE_DFLASH_SPEC_V2=0"),
        ({"SGLANG_ENABLE_SPEC_V2": "1"}, True, False, "--disable-overlap-schedule"),
    ],
)
def test_overlap_follows_its_switches(
    environment: dict[str, str], disabled: bool, schedule: bool, reason: str
) -> None:
    found = cfg.Overlap.resolve(Environment(environment), disabled=disabled)
    assert found.schedule is schedule and reason in found.reason
    assert found.plan_stream is False


@pytest.mark.parametrize("disabled", [False, True])
def test_plan_stream_is_its_own_switch(disabled: bool) -> None:
    environment = {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}
    assert cfg.Overlap.resolve(Environment(environment), disabled=disabled).plan_stream


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_ENABLE_SPEC_V2",
        "SGLANG_ENABLE_DFLASH_SPEC_V2",
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
    ],
)
def test_a_switch_that_is_neither_on_nor_off_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=yes please is neither .* 0, false, 1, true"):
        cfg.Overlap.resolve(Environment({name: "yes please"}), disabled=False)


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("Yes", True), ("n", False)])
def test_switches_have_the_values_that_sglang_takes(value: str, is_on: bool) -> None:
    found = Environment({"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": value})
    assert found.allows_longer_contexts is is_on


def test_a_mask_embedding_is_checked_with_the_weights(tmp_path: Path) -> None:
    """Before they are loaded, which can take minutes."""
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match="mask_embedding.pt of the drafter .* cannot be read"):
        cfg.check_features(drafter(), tmp_path, target=TARGET)
