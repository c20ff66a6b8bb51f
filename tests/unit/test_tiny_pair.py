"""The tiny pair: what is exported and held out, its corpus, and the committed checkpoint."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sglang_dflash.pairs import evaluate_tiny, smollm2_drafter, tiny_drafter, tiny_target
from sglang_dflash.pairs.evaluate_tiny import evaluate, template_answers
from sglang_dflash.pairs.make_tiny import drafter_config
from sglang_dflash.pairs.save import export_drafter, export_target, round_to_bfloat16
from sglang_dflash.pairs.tiny_corpus import templates
from sglang_dflash.pairs.tiny_corpus.corpus import make_conversations, sample_prompts, split_of
from sglang_dflash.reference.model import Drafter, DrafterConfig
from tests.unit.test_train import make_drafter, make_target

RELEASED_KEYS = {
    "architectures",
    "attention_bias",
    "attention_dropout",
    "block_size",
    "dflash_config",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "pad_token_id",
    "rms_norm_eps",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
}


def released_names(layers: int) -> set[str]:
    each = {
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")),
    }
    names = {f"layers.{i}.{name}.weight" for i in range(layers) for name in each}
    return names | {"fc.weight", "hidden_norm.weight", "norm.weight"}


@pytest.mark.parametrize("source", ["exported", "committed"])
def test_drafter_folder_has_exactly_the_released_format(tmp_path, source):
    """If this broke, a stock server would refuse the drafter or load only part of it."""
    folder = tiny_drafter()
    if source == "exported":
        folder = tmp_path
        export_drafter(make_drafter(), folder)
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert set(config) == RELEASED_KEYS
    assert config["architectures"] == ["DFlashDraftModel"]
    assert set(config["dflash_config"]) == {"mask_token_id", "target_layer_ids"}
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == released_names(layers=2)
    assert {v.dtype for v in weights.values()} == {torch.bfloat16}


def test_exported_target_holds_the_weights_it_was_measured_with(tmp_path):
    """If this broke, the drafter would have been trained for another target."""
    target = make_target()
    round_to_bfloat16(target)
    export_target(target, tmp_path, eos_id=2, pad_id=0)
    assert target.dtype == torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in target.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_held_out_prompts_are_never_trained_on():
    """If this broke, the measured accept length would be that of memorised text."""
    held_out = set(sample_prompts(300, seed=0))
    trained = {t.prompt for c in make_conversations(3000, seed=0) for t in c.turns}
    assert len(held_out) == 300
    assert not held_out & trained
    assert {split_of(p) for p in held_out} == {"held_out"}
    assert {split_of(p) for p in trained} == {"train"}


def test_prompts_depend_on_the_seed_alone():
    """If this broke, two runs of a test would measure different prompts."""
    assert sample_prompts(20, seed=1) == sample_prompts(20, seed=1)
    assert sample_prompts(20, seed=1) != sample_prompts(20, seed=2)


@pytest.mark.parametrize(
    "kind", [templates.json_record, templates.json_people, templates.json_island]
)
def test_json_answers_of_the_grammar_are_json(kind):
    """If this broke, the target would be taught to write broken JSON."""
    for seed in range(20):
        json.loads(kind(Random(seed)).answer)


def test_any_text_survives_the_tokenizer(tokenizer):
    """If this broke, a user's prompt could be changed before the model sees it."""
    assert len(tokenizer) == 1024
    for text in ("Hello, Mira!", "naïve 東京 🙂\t\n\n  x", '{"a": [1, 23]}'):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_opens_the_assistant_turn(tokenizer):
    """If this broke, a chat server would prompt the model in a form it never saw."""
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
    )


def test_committed_pair_is_small():
    """If this broke, installing the package would mean downloading weights after all."""
    files = [p for folder in (tiny_target(), tiny_drafter()) for p in folder.iterdir()]
    assert sum(p.stat().st_size for p in files) <= 8 * 2**20


def test_committed_drafter_is_the_one_of_the_recipe(tokenizer):
    """If this broke, rerunning the recipe would not reproduce the shipped pair."""
    config = json.loads((tiny_drafter() / "config.json").read_text())
    assert DrafterConfig.from_json(config) == drafter_config(tokenizer)


def test_committed_pair_accepts_three_tokens_a_step_and_answers_well(tokenizer):
    """If this broke, the shipped drafter would no longer fit the shipped target."""
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).eval()
    drafter = Drafter.from_pretrained(tiny_drafter())
    prompts = sample_prompts(12, seed=0)
    result = evaluate(target, drafter, tokenizer=tokenizer, prompts=prompts)
    assert result.differing == []
    assert result.accept_length >= 3.0, result.report()
    right = template_answers(prompts, seed=0)
    good = [a for p, a in zip(prompts, result.answers, strict=True) if right[p] == a]
    assert len(good) >= 8, result.answers


@pytest.mark.parametrize(
    "wrong", ["--prompts 0", "--prompts -1", "--target none", "--drafter none"]
)
def test_an_evaluation_of_nothing_is_refused(wrong, capsys):
    """`--prompts -1` would otherwise draw prompts for ever."""
    pair = ["--target", str(tiny_target()), "--drafter", str(tiny_drafter())]
    with pytest.raises(SystemExit):
        evaluate_tiny.parse([*pair, *wrong.split()])
    assert f"error: {wrong}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "drafter", "said"),
    [
        (tiny_target(), tiny_target(), r"evaluate_tiny: --drafter .* it is not a DFlash drafter"),
        (tiny_drafter(), tiny_drafter(), r"evaluate_tiny: --target .* has no chat template"),
        (tiny_target(), smollm2_drafter(), r"evaluate_tiny: --drafter .* a target with 8 layers"),
    ],
    ids=["target as drafter", "drafter as target", "drafter of another target"],
)
def test_a_pair_that_is_none_is_one_line(target, drafter, said, monkeypatch):
    words = ["--target", str(target), "--drafter", str(drafter)]
    monkeypatch.setattr("sys.argv", ["evaluate_tiny", *words])
    with pytest.raises(SystemExit, match=said):
        evaluate_tiny.main()
