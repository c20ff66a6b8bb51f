"""Drafters in the speculators format: what their configs mean, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from sglang_dflash.config import DrafterSpec
from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.draft_backends import Place, choose_draft_backend
from sglang_dflash.drafter_config import FULL, SLIDING
from sglang_dflash.reference import Drafter, DrafterConfig
from sglang_dflash.reference.model import block_mask
from sglang_dflash.train.drafter_setup import read_drafter_config
from tests.tiny_configs import HIDDEN, NUM_LAYERS, VOCAB, hf_config
from tests.tiny_models import make_speculators_drafter


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    folder = make_speculators_drafter(tmp_path / "drafter", tokens=300)
    return json.loads((folder / "config.json").read_text())


def test_server_and_oracle_read_the_same(raw: dict[str, Any]) -> None:
    raw |= {"sliding_window_non_causal": True, "sample_from_anchor": True}
    spec = DrafterSpec.from_config(raw, name="drafter")
    oracle = DrafterConfig.from_json(raw)
    # an id counts the embedding as 0
    assert spec.target_layer_ids == oracle.target_layer_ids == (1, 3, 4)
    assert spec.layer_types == oracle.layer_types == (SLIDING, FULL)
    assert spec.sliding_window == oracle.sliding_window == 40
    assert spec.own_vocab_size == oracle.draft_vocab_size == 300
    assert spec.vocab_size == oracle.vocab_size == VOCAB
    assert (spec.block_size, spec.mask_token_id) == (oracle.block_size, oracle.mask_token_id)
    assert not spec.causal_windows and not oracle.causal_windows
    assert spec.samples_from_anchor and oracle.sample_from_anchor
    assert not spec.scales_embedding and not oracle.scale_embedding
    assert [spec.is_causal(layer) for layer in (0, 1)] == [False, False]


def test_defaults_that_the_format_leaves_out_are_those_of_its_library(raw: dict[str, Any]) -> None:
    for key in ("sliding_window_non_causal", "sample_from_anchor", "target_hidden_size"):
        del raw[key]
    del raw["transformer_layer_config"]["head_dim"]
    spec = DrafterSpec.from_config(raw, name="drafter")
    assert spec.causal_windows and not spec.samples_from_anchor
    # of Qwen3, not hidden size / heads
    assert spec.head_dim == 128


def test_a_whole_vocabulary_needs_no_head_of_its_own(raw: dict[str, Any]) -> None:
    raw["draft_vocab_size"] = VOCAB
    assert DrafterSpec.from_config(raw, name="drafter").own_vocab_size is None
    assert Drafter(DrafterConfig.from_json(raw)).lm_head is None


DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "draft_vocab_size": VOCAB,
    "selector_rank": 8,
    "selector_top_k": 4,
    "speculators_model_type": "dflash2",
}


def test_dflash2_is_read_with_the_defaults_of_its_library(raw: dict[str, Any]) -> None:
    del raw["sliding_window_non_causal"], raw["sample_from_anchor"]
    oracle = DrafterConfig.from_json(raw | DFLASH2)
    spec = DrafterSpec.from_config(raw | DFLASH2, name="drafter")
    assert not spec.causal_windows and not spec.scales_embedding
    assert (
        oracle.dflash2
        == spec.dflash2
        == DFlash2(conv_taps=2, conv_group_size=16, selector_rank=8, selector_top_k=4)
    )
    assert not oracle.causal_windows and not oracle.scale_embedding


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"selector_rank": None}, "lacks dflash_config.selector_rank"),
        ({"draft_vocab_size": 300}, "does not support: draft_vocab_size 300"),
        ({"sample_from_anchor": True}, "does not support: dflash_config.sample_from_anchor True"),
        ({"draft_ffn_type": "moe"}, "does not support: draft_ffn_type 'moe'"),
    ],
)
def test_dflash2_that_cannot_be_run_is_refused(
    raw: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    for read in (DrafterConfig.from_json, DrafterSpec.from_config):
        with pytest.raises(ValueError, match="some/drafter") as refused:
            read(raw | DFLASH2 | changes, name="some/drafter")
        assert named in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators model of type 'eagle3'"),
        ({"selector_rank": 4}, "does not support: dflash_config.selector_rank 4"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "0 is the embedding"),
        ({"aux_hidden_state_layer_ids": None}, "lacks aux_hidden_state_layer_ids"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"target_hidden_size": 64}, "reads features of size 64"),
        ({"fusion_weights": True}, "does not support: fusion_weights True"),
    ],
)
def test_what_cannot_be_served_is_refused(
    raw: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    for read in (DrafterConfig.from_json, DrafterSpec.from_config):
        with pytest.raises(ValueError, match="some/drafter") as refused:
            read({**raw, **changes}, name="some/drafter")
        assert named in str(refused.value)


@pytest.mark.parametrize("changes", [{"mlp_bias": True}, {"hc_mult": 4}])
def test_layers_go_through_the_same_list(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    raw["transformer_layer_config"] |= changes
    with pytest.raises(ValueError, match=f"does not support: {next(iter(changes))}"):
        DrafterSpec.from_config(raw, name="drafter")


def test_unknown_layers_are_told(raw: dict[str, Any]) -> None:
    raw["transformer_layer_config"]["model_type"] = "nothing_known"
    with pytest.raises(ValueError, match="cannot be read as 'nothing_known'"):
        DrafterSpec.from_config(raw, name="drafter")


def test_windows_that_end_within_a_block_are_refused(raw: dict[str, Any]) -> None:
    """Backends differ in what a row then sees to its right."""
    raw |= {"sliding_window_non_causal": True}
    raw["transformer_layer_config"]["sliding_window"] = 15
    with pytest.raises(ValueError, match="non-causal windows of 15 tokens, shorter than"):
        DrafterSpec.from_config(raw, name="drafter")


def test_non_causal_windows_need_a_backend_that_has_them(raw: dict[str, Any]) -> None:
    hopper = Place("cuda", (9, 0), is_fp32=False)
    causal = DrafterSpec.from_config(raw, name="drafter")
    assert choose_draft_backend(causal, hopper, asked="flashinfer") == "flashinfer"
    other = DrafterSpec.from_config({**raw, "sliding_window_non_causal": True}, name="drafter")
    assert choose_draft_backend(other, hopper, asked="fa4") == "fa4"
    with pytest.raises(ValueError, match="non-causal sliding_attention.*fa4 or triton or fa3"):
        choose_draft_backend(other, hopper, asked="flashinfer")


def test_the_oracle_sees_a_whole_block_through_a_non_causal_window() -> None:
    positions = torch.tensor([[[7, 8, 9]]])
    lens = torch.tensor([7])
    mask = block_mask(positions, context_lens=lens, context_size=7, window=4, causal=False)
    assert mask[0].long().tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
    ]


def test_the_oracle_drafts_tokens_of_its_own_head_only(tmp_path: Path) -> None:
    drafter = Drafter.from_pretrained(make_speculators_drafter(tmp_path / "a", tokens=300))
    target_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    logits = drafter.logits(torch.randn(5, HIDDEN), target_head)
    assert logits.shape == (5, VOCAB)
    tokens = drafter.d2t + torch.arange(300)
    assert (logits.isfinite().sum(1) == 300).all() and logits[:, tokens].isfinite().all()


def test_training_goes_on_from_this_format_with_the_targets_head(tmp_path: Path) -> None:
    target: PretrainedConfig = hf_config("qwen3")
    whole = make_speculators_drafter(tmp_path / "whole")
    assert read_drafter_config(whole, target).num_target_layers == NUM_LAYERS
    own = make_speculators_drafter(tmp_path / "own", tokens=300)
    with pytest.raises(ValueError, match="has a head of its own"):
        read_drafter_config(own, target)
