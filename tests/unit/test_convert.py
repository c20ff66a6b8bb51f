"""Drafters rewritten in the other format: the same drafter, or an error that says why not."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.__main__ import main
from sglang_dflash.config import DrafterSpec
from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.reference import Drafter
from tests.tiny_configs import HIDDEN, VOCAB
from tests.tiny_models import (
    make_dflash2_drafter,
    make_drafter,
    make_speculators_drafter,
    make_target,
)

# what the reader of speculators 0.9.0 takes from a config.json of type dflash, and the tensors that
# it does not take from the target. The library itself is no dependency of the tests: it installs
# torchvision, torchaudio and datasets, among others. With it, the last test runs its reader
CONFIG_FIELDS = {
    *("architectures", "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size"),
    *("mask_token_id", "sample_from_anchor", "sliding_window_non_causal", "speculators_config"),
    *("speculators_model_type", "speculators_version", "target_hidden_size"),
    "transformer_layer_config",
}
PROPOSAL_FIELDS = {"proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance"}
ALWAYS_READ = {"fc.weight", "hidden_norm.weight", "norm.weight"}
LAYER_TENSORS = {
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target("qwen3", tmp_path_factory.mktemp("pair") / "target")


def convert(source: Path, destination: Path, *arguments: str | Path) -> Path:
    assert main(["convert", *map(str, (source, destination, *arguments))]) == 0
    return destination


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_network(one: Path, other: Path) -> None:
    drafters = [Drafter.from_pretrained(folder).state_dict() for folder in (one, other)]
    assert drafters[0].keys() == drafters[1].keys()
    assert all(torch.equal(drafters[0][name], drafters[1][name]) for name in drafters[0])
    specs = [DrafterSpec.from_config(read(folder), name="a drafter") for folder in (one, other)]
    # of an unscaled embedding it does not matter
    assert vars(specs[0]) | {"scales_embedding": True} == vars(specs[1]) | {
        "scales_embedding": True
    }


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_drafter_survives_the_way_there_and_back(
    tmp_path: Path, target: Path, prefix: str
) -> None:
    source = make_drafter(tmp_path / "source", prefix=prefix)
    there = convert(source, tmp_path / "there", "--model-path", target)
    assert read(there)["aux_hidden_state_layer_ids"] == [2, 4, 5]
    same_network(source, there)
    back = convert(there, tmp_path / "back", "--model-path", target)
    assert "speculators_model_type" not in read(back)
    assert read(back)["num_target_layers"] == read(source)["num_target_layers"]
    same_network(source, back)


def test_what_is_written_is_what_the_reader_takes(tmp_path: Path, target: Path) -> None:
    there = convert(make_drafter(tmp_path / "a"), tmp_path / "b", "--model-path", target)
    config = read(there)
    assert set(config) <= CONFIG_FIELDS
    (method,) = config["speculators_config"]["proposal_methods"]
    assert set(method) <= PROPOSAL_FIELDS and method["speculative_tokens"] == 15
    verifier = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": str(target)}
    assert config["speculators_config"]["verifier"] == verifier
    layers = {f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER_TENSORS}
    assert set(load_file(there / "model.safetensors")) == layers | ALWAYS_READ


def test_windows_that_are_not_causal_stay_so(tmp_path: Path, target: Path) -> None:
    source = make_speculators_drafter(tmp_path / "a", sliding_window_non_causal=True)
    back = convert(source, tmp_path / "b")
    assert read(back)["is_causal"] is False
    same_network(source, back)
    there = convert(back, tmp_path / "c", "--model-path", target)
    assert read(there)["sliding_window_non_causal"] is True
    same_network(source, there)


def test_a_dflash2_drafter_survives_the_way_there_and_back(tmp_path: Path, target: Path) -> None:
    source = make_dflash2_drafter(tmp_path / "source")
    there = convert(source, tmp_path / "there", "--model-path", target)
    # of speculators 0.9.0
    sizes = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
    assert set(read(there)) <= CONFIG_FIELDS | sizes
    assert read(there)["speculators_model_type"] == "dflash2"
    same_network(source, there)
    same_network(source, convert(there, tmp_path / "back", "--model-path", target))


def test_logits_that_one_format_cannot_multiply_are_told(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"conv_taps": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 4}
    source = make_dflash2_drafter(tmp_path / "a", dflash2=DFlash2(**sizes, logit_cap=20.0))
    assert main(["convert", str(source), str(tmp_path / "b"), "--model-path", str(target)]) == 1
    assert "caps its logits" in capsys.readouterr().out


def test_a_head_that_is_a_copy_of_the_targets_is_left_out(tmp_path: Path, target: Path) -> None:
    source = make_speculators_drafter(tmp_path / "a", tokens=300)
    weights = load_file(source / "model.safetensors")
    # the target's head is its embedding
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    save_file(
        {**weights, "lm_head.weight": embedding[weights["t2d"]]}, source / "model.safetensors"
    )
    back = convert(source, tmp_path / "b", "--model-path", target)
    assert DrafterSpec.from_config(read(back), name="b").own_vocab_size is None
    assert "lm_head.weight" not in load_file(back / "model.safetensors")


def test_a_head_of_its_own_survives_in_the_speculators_format(tmp_path: Path, target: Path) -> None:
    source = make_speculators_drafter(tmp_path / "a", tokens=300)
    Drafter.from_pretrained(source).save_pretrained(tmp_path / "b")
    there = convert(tmp_path / "b", tmp_path / "c", "--model-path", target)
    tensors = [load_file(folder / "model.safetensors") for folder in (source, there)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in ("d2t", "t2d"))
    same_network(tmp_path / "b", there)


@pytest.mark.parametrize(
    ("tokens", "changes", "needs_target", "told"),
    [
        (VOCAB, {"sample_from_anchor": True}, False, "cannot represent"),
        (300, {}, False, "Pass --model-path with the target's folder to compare"),
        (300, {}, True, "its rows differ from those of"),
        (VOCAB, {"speculators_model_type": "eagle3"}, False, "speculators model of type 'eagle3'"),
        (
            VOCAB,
            {"speculators_config": {"verifier": {"architectures": ["Gemma4ForCausalLM"]}}},
            False,
            "for a target that scales its embedding (Gemma4ForCausalLM)",
        ),
    ],
)
def test_what_the_released_format_cannot_represent_is_told(
    tmp_path: Path,
    target: Path,
    capsys: pytest.CaptureFixture[str],
    tokens: int,
    changes: dict[str, Any],
    needs_target: bool,
    told: str,
) -> None:
    source = make_speculators_drafter(tmp_path / "a", tokens=tokens)
    (source / "config.json").write_text(json.dumps(read(source) | changes))
    given = ["--model-path", str(target)] if needs_target else []
    assert main(["convert", str(source), str(tmp_path / "b"), *given]) == 1
    assert told in capsys.readouterr().out
    assert not (tmp_path / "b").exists()


def test_wrong_arguments_are_told(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_drafter(tmp_path / "a")
    asked = {
        (str(source), str(tmp_path / "b")): "Pass --model-path with the drafter's target",
        (str(source), str(source)): "exists already",
        (str(tmp_path / "nothing"), str(tmp_path / "b")): "has no config.json",
        (
            str(source),
            str(tmp_path / "b"),
            "--model-path",
            str(tmp_path),
        ): "has no config.json. Pass the drafter's target",
        (str(source), str(tmp_path / "b"), "--model-path", "no/such/folder"): "has no model that",
    }
    for arguments, told in asked.items():
        assert main(["convert", *arguments]) == 1
        assert told in capsys.readouterr().out
    (source / "model.safetensors").unlink()
    assert main(["convert", str(source), str(tmp_path / "b"), "--model-path", str(target)]) == 1
    assert "has no safetensors" in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], source: Path, target: Path) -> str:
    destination = source.parent / "refused"
    assert main(["convert", str(source), str(destination), "--model-path", str(target)]) == 1
    assert not destination.exists()
    [told] = capsys.readouterr().out.splitlines()
    return told


@pytest.mark.parametrize("make", [make_drafter, make_speculators_drafter])
def test_tensors_that_no_server_would_load_are_refused(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str], make: Callable[..., Path]
) -> None:
    source = make(tmp_path / "a")
    file = source / "model.safetensors"
    whole = load_file(file)

    def told(**changes: torch.Tensor | None) -> str:
        found = {name: each for name, each in (whole | changes).items() if each is not None}
        save_file(found, file)
        return refusal(capsys, source, target)

    renamed = told(**{"norm.weight": None, "extra.weight": torch.zeros(2)})
    assert "1 missing (norm.weight), 1 unknown (extra.weight)" in renamed
    norm = told(**{"norm.weight": torch.zeros(2)})
    assert f"(norm.weight has shape [2] instead of [{HIDDEN}])" in norm
    # as after a download that was interrupted between two shards
    half = told(**{name: None for name in whole if name.startswith("layers.1.")})
    assert "11 missing (layers.1.input_layernorm.weight, layers.1.mlp" in half


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "config.json holds [], not an object"),
        ("null", "config.json holds null, not an object"),
        ("{", "is not JSON"),
        ('{"dflash_config": "x"}', "dflash_config is 'x', not an object"),
        ('{"dflash_config": {"target_layer_ids": 5}}', "target_layer_ids is 5, not a list"),
        ('{"layer_types": 5}', "layer_types is 5, not a list of words"),
        ('{"num_hidden_layers": "two"}', "num_hidden_layers is 'two', not a whole number"),
        ('{"speculators_model_type": "dflash", "speculators_config": 5}', "not an object"),
    ],
)
def test_a_config_that_is_none_is_one_sentence(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str], content: str, told: str
) -> None:
    source = make_drafter(tmp_path / "a")
    (source / "config.json").write_text(content)
    assert told in refusal(capsys, source, target)


@pytest.mark.parametrize(
    "changes", [{"block_size": 0}, {"num_attention_heads": 0}, {"hidden_size": "128"}], ids=str
)
def test_a_drafter_that_cannot_be_served_is_not_converted(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    source = make_drafter(tmp_path / "a")
    (source / "config.json").write_text(json.dumps(read(source) | changes))
    assert "cannot be right: " in refusal(capsys, source, target)


def test_a_folder_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_drafter(tmp_path / "a")
    within = source / "config.json" / "new"
    assert main(["convert", str(source), str(within), "--model-path", str(target)]) == 1
    assert capsys.readouterr().out == (
        f"{within} cannot be made: Not a directory. Pass a new folder as DST, where you may "
        "write.\n"
    )


@torch.no_grad()
@pytest.mark.skipif(not importlib.util.find_spec("speculators"), reason="needs speculators")
@pytest.mark.parametrize("kind", ["converted", "own head", "non-causal"])
def test_the_librarys_own_model_computes_the_same(tmp_path: Path, target: Path, kind: str) -> None:
    """Its reader loads the folder, and its logits of every block are the oracle's."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    if kind == "converted":
        # the library's windows count from the anchor, ours from each row
        source = make_drafter(tmp_path / "a", layer_types=("full_attention",) * 2)
        folder = convert(source, tmp_path / "b", "--model-path", target)
    else:
        folder = make_speculators_drafter(
            tmp_path / "a",
            tokens=300 if kind == "own head" else VOCAB,
            sliding_window_non_causal=kind == "non-causal",
        )
        verifier = {"architectures": [], "name_or_path": str(target)}
        raw = read(folder)
        raw["speculators_config"]["verifier"] = verifier
        # so that all of the context is within it
        raw["transformer_layer_config"]["sliding_window"] = 1000
        (folder / "config.json").write_text(json.dumps(raw))
    drafter = Drafter.from_pretrained(folder)
    config = DFlashSpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = DFlashDraftModel.from_pretrained(str(folder), config=config).float()
    torch.manual_seed(0)
    length, anchors = 60, 8
    features = torch.randn(1, length, 3 * HIDDEN)
    token_ids = torch.randint(3, VOCAB, (1, length))
    _, found, _, _, rows = model._backbone_forward(
        features,
        token_ids,
        torch.ones(1, length),
        torch.zeros(1, length, HIDDEN),
        torch.zeros(1, length, dtype=torch.int64),
        max_anchors=anchors,
    )
    places = rows.view(anchors, 16)[None, :, 0]
    blocks = torch.full((1, anchors, 16), 2)
    blocks[:, :, 0] = token_ids.gather(1, places)
    context = drafter.context_kv(drafter.project(features), torch.arange(length)[None])
    hidden = drafter.forward_anchors(
        drafter.embed(model.embed_tokens, blocks),
        places,
        context=context,
        context_lens=torch.tensor([length]),
    )
    expected = drafter.logits(hidden.flatten(0, 2), model.lm_head)
    expected = expected[expected.isfinite()].view(anchors * 16, -1)
    torch.testing.assert_close(found[0], expected, atol=2e-4, rtol=1e-4)
