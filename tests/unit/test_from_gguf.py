"""The GGUF converter, on models of both kinds that are built here."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sglang_dflash.pairs import from_gguf
from sglang_dflash.pairs.save import round_to_bfloat16

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{{ messages[0]['content'] }}"
PARTS = {v: k for k, v in (from_gguf.LAYER | from_gguf.OUTSIDE).items()}


@dataclass(frozen=True)
class Kind:
    name: str
    splitter: str
    config: type
    model: type
    tied: bool


KINDS = (
    Kind("llama", "smollm", LlamaConfig, LlamaForCausalLM, tied=True),
    Kind("llama", "smollm", LlamaConfig, LlamaForCausalLM, tied=False),
    Kind("qwen2", "qwen2", Qwen2Config, Qwen2ForCausalLM, tied=True),
)


def make_model(kind: Kind) -> PreTrainedModel:
    torch.manual_seed(0)
    config = kind.config(
        vocab_size=265,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=kind.tied,
        initializer_range=0.2,
    )
    model = kind.model(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    round_to_bfloat16(model)
    return model.eval()


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleave the rows of the two halves of each head, as GGUF stores them."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(weight.shape)


def write_gguf(kind: Kind, model: PreTrainedModel, path: Path) -> None:
    writer = gguf.GGUFWriter(path, kind.name)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind.splitter)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab", "abc", "<call>"]
    tokens += ["[PAD0]", "[PAD1]"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 6) + [4] + [5] * 2)
    writer.add_token_merges(["1 2", "a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if kind.name == "llama":
        writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    weights = model.state_dict()
    if kind.name == "qwen2":
        # embedding and head stored separately, the embedding more coarsely
        coarse = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = (coarse * 32).round() / 32
    elif kind.tied:
        del weights["lm_head.weight"]
    for name, value in weights.items():
        *stem, last = name.split(".")
        layer = stem[2] if "layers" in stem else None
        part = PARTS[".".join(stem[3:] if layer else stem)]
        if kind.name == "llama" and part in ("attn_q", "attn_k"):
            value = interleave(value, 4 if part == "attn_q" else 2)
        full = f"blk.{layer}.{part}.{last}" if layer else f"{part}.{last}"
        writer.add_tensor(full, np.ascontiguousarray(value.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=KINDS, ids=["llama", "llama, own head", "qwen2"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Kind, Path]:
    work = tmp_path_factory.mktemp("gguf")
    write_gguf(request.param, make_model(request.param), work / "model.gguf")
    from_gguf.make_folder(work / "model.gguf", work / "made")
    return request.param, work / "made"


def test_the_converted_model_computes_what_the_original_does(made: tuple[Kind, Path]):
    """If this broke, the target would talk nonsense, most likely because of misordered rows."""
    kind, folder = made
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 9, 77, 200, 3]])
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, make_model(kind)(ids).logits)
    assert converted.config.eos_token_id == 2
    assert converted.config.tie_word_embeddings == kind.tied


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(made: tuple[Kind, Path]):
    """If this broke, numbers would become tokens that the model has never seen."""
    _, folder = made
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abc12")) == ["abc", "1", "2"]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode(tokenizer.encode("a 12 ü\n")) == "a 12 ü\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    assert tokenizer.chat_template == TEMPLATE
    # a token of its own, but not skipped as a special one
    assert tokenizer.encode("<call>") == [262]
    assert tokenizer.decode([262, 2], skip_special_tokens=True) == "<call>"
    assert len(tokenizer) == 263


def test_what_is_not_known_is_refused(tmp_path: Path):
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        from_gguf.make_folder(tmp_path / "text.gguf", tmp_path / "out")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="holds a 'mamba' model; supported: llama, qwen2"):
        from_gguf.make_folder(tmp_path / "other.gguf", tmp_path / "out")
    with pytest.raises(ValueError, match=r"'blk.0.attn_sinks.weight', which this converter"):
        from_gguf.target_name("blk.0.attn_sinks.weight")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_the_user_is_refused_and_kept(made: tuple[Kind, Path], tmp_path: Path):
    """`--out ~/models` would once have deleted all models."""
    gguf_file = made[1].parent / "model.gguf"
    models = tmp_path / "models"
    (models / "other").mkdir(parents=True)
    (models / "config.json").write_text("{}")
    (models / "other" / "model.safetensors").write_text("weights")
    with pytest.raises(ValueError, match="models has what this program did not write, such as oth"):
        from_gguf.make_folder(gguf_file, models)
    assert (models / "other" / "model.safetensors").read_text() == "weights"
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="file is a file. Name a folder"):
        from_gguf.make_folder(gguf_file, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_another_models_folder_is_refused_though_its_files_have_the_same_names(
    made: tuple[Kind, Path], tmp_path: Path
):
    kind, folder = made
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    make_model(kind).config.save_pretrained(other)
    with pytest.raises(ValueError, match="other has what this program did not write, such as conf"):
        from_gguf.make_folder(folder.parent / "model.gguf", other)


def test_an_earlier_result_and_an_empty_folder_are_replaced(
    made: tuple[Kind, Path], tmp_path: Path
):
    kind, folder = made
    out = tmp_path / "out"
    out.mkdir()
    from_gguf.make_folder(folder.parent / "model.gguf", out)
    earlier = (out / "config.json").stat().st_ino
    from_gguf.make_folder(folder.parent / "model.gguf", out)
    assert {path.name for path in out.iterdir()} == from_gguf.FILES
    assert (out / "config.json").stat().st_ino != earlier
    # nothing is left beside it
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_refused_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "kept").write_text("")
    monkeypatch.setattr(sys, "argv", ["from_gguf", "some.gguf", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^from_gguf: --out .* such as kept, and would replace"):
        from_gguf.main()
