"""What a training run is made of before it starts: questions, drafter, defaults and batches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.pairs import tiny_target
from sglang_dflash.reference.model import FULL
from sglang_dflash.train.acceptance import sample_at
from sglang_dflash.train.answers import (
    Question,
    ask_transformers,
    make_questions,
)
from sglang_dflash.train.arguments import (
    add_train_options,
    make_config,
    read_invocation,
    read_temperatures,
)
from sglang_dflash.train.batches import Batches, make_example
from sglang_dflash.train.blocks import choose_attention
from sglang_dflash.train.config import TrainConfig, default_gamma
from sglang_dflash.train.drafter_setup import (
    choose_mask_token,
    make_drafter_config,
    spread_layer_ids,
)
from sglang_dflash.train.prompts import read_prompts


def test_a_fresh_order_of_batches_can_be_entered_anywhere():
    """If this broke, a resumed run would read some examples twice and others never."""
    examples = [make_example([7] * n, [1] * n) for n in range(2, 30)]
    settings = {"tokens_per_batch": 64, "pad_id": 0, "seed": 4}
    first = Batches(examples, **settings)
    lens = [next(first).lens.tolist() for _ in range(3 * len(first.groups))]
    assert sorted(sum(lens[: len(first.groups)], [])) == list(range(2, 30))
    second = Batches(examples, **settings)
    second.seek(1, 2)
    assert next(second).lens.tolist() == lens[len(second.groups) + 2]


def test_sampled_answers_do_not_depend_on_how_a_run_was_cut():
    """If this broke, a resumed run would not reproduce the answers of its seed."""
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).eval()
    questions = [Question(str(i), [1, 40 + i, 50], 1.0, 6) for i in range(4)]
    ask = ask_transformers(target, stop=(2,), pad_id=0, seed=0, rows=2)
    assert ask(questions)[2:] == ask(questions[2:])
    other = ask_transformers(target, stop=(2,), pad_id=0, seed=1, rows=2)
    assert other(questions) != ask(questions)


def test_further_answers_to_a_prompt_are_sampled_and_held_out_prompts_have_none():
    """If this broke, an answer would be trained on twice, or a held-out prompt would be learned."""
    questions = make_questions(
        {"a": [1], "b": [2], "c": [3]},
        held_out=1,
        temperatures={0.0: 1.0, 1.0: 0.001},
        per_prompt=3,
        max_new_tokens=9,
        max_length=9,
        seed=0,
    )
    assert [q.key for q in questions] == ["a.0", "b.0", "c.0", "b.1", "c.1", "b.2", "c.2"]
    assert [q.temperature for q in questions] == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("count", "ids"), [(30, (1, 8, 14, 20, 27)), (36, (1, 9, 17, 25, 33)), (3, (0, 1)), (2, (0,))]
)
def test_features_are_spread_as_in_the_released_drafters(count: int, ids: tuple[int, ...]):
    """If this broke, default drafters would read uninformative layers."""
    assert spread_layer_ids(count) == ids


def test_without_a_mask_token_an_unused_row_or_special_token_serves():
    """If this broke, a token of real text would double as the mask."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    config = AutoConfig.from_pretrained(tiny_target())
    assert choose_mask_token(config, tokenizer) == 3
    tokenizer.mask_token = None
    # <|mask|> stays a special token, and the chat template does not name it
    assert choose_mask_token(config, tokenizer) == 3
    config.vocab_size += 64
    assert choose_mask_token(config, tokenizer) == 1024


def test_the_drafter_takes_its_widths_and_rope_from_the_target():
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    config = AutoConfig.from_pretrained(tiny_target())
    made = make_drafter_config(
        config,
        tokenizer,
        layers=3,
        block_size=8,
        target_layer_ids=None,
        mask_token_id=None,
        sliding_window=0,
        stop=(2,),
    )
    assert (made.hidden_size, made.intermediate_size, made.head_dim) == (128, 384, 64)
    assert made.rope_theta == 10000.0
    assert made.layer_types == (FULL,) * 3
    assert made.target_layer_ids == (1, 2, 3, 4, 5)


def test_published_decays_are_the_defaults():
    assert [default_gamma(n) for n in (16, 10, 8)] == [7.0, 5.0, 4.0]


def test_large_dense_masks_are_left_to_flex_attention_on_a_gpu():
    """If this broke, long sequences would run out of memory, or short ones wait for compilation."""
    sizes = {"block_size": 16, "blocks": 96 * 42, "tokens_per_batch": 32768, "max_length": 768}
    assert choose_attention(torch.device("cuda"), **sizes) == "sdpa"
    large = sizes | {"blocks": 512 * 10, "max_length": 3072}
    assert choose_attention(torch.device("cuda"), **large) == "flex"
    assert choose_attention(torch.device("cpu"), **large) == "sdpa"


def test_long_and_repeated_prompts_are_counted(tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    path = tmp_path / "lines.txt"
    path.write_text("Hello\nHello\n" + "a long line " * 60 + "\n")
    found = read_prompts([path], tokenizer=tokenizer, thinking=None, max_length=80)
    assert (len(found.token_ids), found.repeated, found.too_long) == (1, 1, 1)
    assert found.files[0].rows == 3


def configure(
    *arguments: str, device: str, before: dict[str, Any] | None = None
) -> tuple[TrainConfig, str]:
    """Return the config of a command line, and the defaults chosen for the device."""
    parser = argparse.ArgumentParser()
    add_train_options(parser)
    options = parser.parse_args(["--model-path", "m", "--out", "o", *arguments])
    invocation = read_invocation(options, arguments)
    return make_config(options, invocation=invocation, device=device, before=before or {})


def test_what_was_not_set_is_small_on_a_cpu():
    """If this broke, a first try on a CPU would take hours, or a GPU run would train too little."""
    cpu, flags = configure("--held-out", "3", device="cpu")
    gpu, _ = configure("--held-out", "3", device="cuda")
    assert (gpu.tokens_per_batch, gpu.anchors, gpu.max_length) == (32768, 96, 1024)
    assert (gpu.steps, gpu.optimizer, gpu.held_out) == (3000, "muon", 3)
    blocks = [o.anchors * o.tokens_per_batch // o.max_length for o in (cpu, gpu)]
    assert blocks[0] < blocks[1] / 20 and cpu.steps < gpu.steps / 3
    assert (cpu.optimizer, cpu.held_out) == ("adamw", 3)
    assert f"--steps {cpu.steps} " in flags and "--held-out" not in flags


def test_a_continued_run_keeps_its_defaults_on_another_device():
    """If this broke, a run could only be continued where it began."""
    gpu, _ = configure(device="cuda")
    cpu, _ = configure("--minutes", "2", "--anchors", "7", device="cpu", before=gpu.settings())
    assert (cpu.tokens_per_batch, cpu.optimizer, cpu.held_out) == (32768, "muon", 64)
    assert (cpu.steps, cpu.anchors) == (None, 7)


def test_a_long_sequence_that_was_asked_for_has_room_in_a_batch():
    config, _ = configure("--max-length", "5000", device="cpu")
    assert config.tokens_per_batch == 5000


def test_questions_mix_temperatures_by_their_shares():
    """If this broke, the drafter would see a different kind of text than requested."""
    prompts = {f"{i:04d}": [1, 2] for i in range(2000)}
    questions = make_questions(
        prompts,
        held_out=100,
        temperatures=read_temperatures(["0:50", "0.7:25", "1"]),
        max_new_tokens=50,
        max_length=40,
        seed=0,
    )
    assert {q.temperature for q in questions[:100]} == {0.0}
    assert {q.max_new_tokens for q in questions} == {38}
    share = sum(q.temperature == 0.7 for q in questions[100:]) / 1900
    assert share == pytest.approx(25 / 76, abs=0.04)


@pytest.mark.parametrize("seed", [-1, 2**31, 2**32])
def test_seeds_that_no_sampler_takes_are_refused(seed: int):
    """If this broke, the evaluation at the end of a run would overflow."""
    with pytest.raises(ValueError, match=f"--seed is {seed}. Pass 0 to 2147483647."):
        configure("--seed", str(seed), device="cpu")
    assert configure("--seed", str(2**31 - 1), device="cpu")[0].seed == 2**31 - 1
    sample_at(1.0, seed=2**31 - 1)(torch.zeros(4), [0] * 9)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize(
    "option",
    [
        "--learning-rate",
        "--gamma",
        "--checkpoint-every",
        "--minutes",
        "--pause-after",
        "--answer-minutes",
    ],
)
def test_numbers_that_are_not_above_zero_and_finite_are_refused(option: str, value: str):
    """If this broke, a run would end in NaN, never end, or save after every step."""
    with pytest.raises(ValueError, match=f"^{option} is {value}[.0]* Pass a finite number above 0"):
        configure("--loss", "decay", f"{option}={value}", device="cpu")


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["nan"], "'nan'"),
        (["inf:1"], "'inf:1'"),
        (["-1:1"], "'-1:1'"),
        (["0:1", "1:nan"], "'1:nan'"),
        (["0:inf"], "'0:inf'"),
        (["0:1", "1:0"], "'1:0'"),
        (["1:-1"], "'1:-1'"),
        (["hot"], "'hot'"),
        (["0:50", "0.7:25", "0.0:25"], "'0.0:25', but temperature 0 was already given"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_temperatures_that_cannot_be_mixed_are_refused(texts: list[str], reason: str):
    """If this broke, a share would be lost, or every question would have the same temperature."""
    with pytest.raises(ValueError, match=f"^--temperatures has {reason}"):
        read_temperatures(texts)


def test_the_help_says_what_each_choice_means():
    parser = argparse.ArgumentParser()
    add_train_options(parser)
    helps = {action.dest: str(action.help) for action in parser._actions}
    for name, default in (("labels", "soft"), ("loss", "dpace")):
        [choices] = [action.choices for action in parser._actions if action.dest == name]
        assert all(f"{choice}: " in helps[name] for choice in choices or ()), helps[name]
        assert helps[name].endswith(f"default: {default}")
    assert "answer only every N-th prompt, starting with the K-th" in helps["share"]
