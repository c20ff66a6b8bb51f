"""Convert a GGUF file to a Hugging Face folder for SGLang and the trainer.

    python -m sglang_dflash.pairs.from_gguf FILE.gguf --out DIR

Supports Llama and Qwen2 with a byte-level BPE. Quantised weights are dequantised to bfloat16: the
result is the quantised model, not the original, and needs a drafter trained for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from torch import Tensor

    Splitter = tuple[Normalizer | None, PreTokenizer]


@dataclass(frozen=True)
class Family:
    architecture: str
    # RoPE layout of GGUF's q and k heads: interleaved pairs; transformers uses two halves
    interleaved: bool


FAMILIES = {
    "llama": Family("LlamaForCausalLM", interleaved=True),
    "qwen2": Family("Qwen2ForCausalLM", interleaved=False),
}
# modules of a layer: GGUF name -> transformers name
LAYER = {
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
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# GGUF token types other than the normal one
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# contractions, words, single digits, punctuation, line ends, spaces
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# what this program writes into a folder, which is all that it replaces
FILES = frozenset(
    ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    + ("model.safetensors",)
)
# and into config.json: transformers would write more
CONFIG = frozenset(
    ("architectures", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size")
    + ("intermediate_size", "max_position_embeddings", "model_type", "num_attention_heads")
    + ("num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_theta")
    + ("tie_word_embeddings", "torch_dtype", "transformers_version", "vocab_size")
)
# cosine similarity above which two matrices are one matrix quantised twice (tied embeddings)
SAME_MATRIX = 0.98


def make_folder(gguf: Path, folder: Path) -> None:
    """Convert into `folder`, which appears when it is complete, in place of an earlier result.
    Raise ValueError if anything else is there."""
    folder = folder.resolve()
    refuse_another(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        convert(gguf, made)
        # a minute has passed
        refuse_another(folder)
        if folder.exists():
            folder.rename(Path(work) / "earlier")
        made.rename(folder)
    folder.chmod(0o755)


def refuse_another(folder: Path) -> None:
    """Raise ValueError unless the folder is absent, empty or an earlier result of this program."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file. Name a folder that is new or empty.")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if found and not (found == FILES and is_converted(folder / "config.json")):
        other = min(found - FILES, default="config.json")
        raise ValueError(
            f"--out {folder} has what this program did not write, such as {other}, and would "
            "replace all of it. Name a folder that is new or empty."
        )


def is_converted(config: Path) -> bool:
    """Return whether a config.json has exactly what this program writes."""
    try:
        return set(json.loads(config.read_text())) == CONFIG
    except (OSError, ValueError, TypeError):
        return False


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and bfloat16 weights. Raise ValueError for unsupported models."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError) as error:
        raise ValueError(f"{gguf} is not a GGUF file: {error}.") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"]
    if kind not in FAMILIES:
        raise ValueError(f"{gguf} holds a {kind!r} model; supported: {', '.join(FAMILIES)}.")
    config = target_config(fields)
    weights = read_weights(reader.tensors, FAMILIES[kind], config)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    _write(folder / "config.json", config)
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write(folder / "generation_config.json", {name: config[name] for name in ends})
    write_tokenizer(fields, folder)

    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def target_config(fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields["general.architecture"]
    own = {name.removeprefix(f"{kind}."): value for name, value in fields.items()}
    heads = own["attention.head_count"]
    return {
        "architectures": [FAMILIES[kind].architecture],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": own["embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "max_position_embeddings": own["context_length"],
        "model_type": kind,
        "num_attention_heads": heads,
        "num_hidden_layers": own["block_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": round(own["attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": own["rope.freq_base"],
        "torch_dtype": "bfloat16",
        # without it transformers warns about a tokenizer of some Mistral models
        "transformers_version": version("transformers"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write the byte-level BPE. GGUF gives the pre-tokenizer only by name, see SPLITTERS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    known = {t: i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k != _UNUSED}
    raw = Tokenizer(models.BPE(known, merges))
    name = fields["tokenizer.ggml.pre"]
    if name not in SPLITTERS:
        raise ValueError(f"Its pre-tokenizer is {name!r}; supported: {list(SPLITTERS)}.")
    raw.normalizer, raw.pre_tokenizer = SPLITTERS[name]()
    raw.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            raw.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            raw.add_tokens([AddedToken(token, special=False, normalized=False)])
    raw.save(str(folder / "tokenizer.json"))
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    places = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    _write(
        folder / "tokenizer_config.json",
        {
            "chat_template": fields["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": tokens[i] for name, i in places.items() if i is not None},
        },
    )


def _split_smollm() -> Splitter:
    from tokenizers import pre_tokenizers as split

    digits = split.Digits(individual_digits=True)
    return None, split.Sequence([digits, split.ByteLevel(add_prefix_space=False)])


def _split_qwen2() -> Splitter:
    from tokenizers import Regex, normalizers
    from tokenizers import pre_tokenizers as split

    words = split.Split(Regex(_QWEN2_SPLIT), "isolated")
    bytes_only = split.ByteLevel(add_prefix_space=False, use_regex=False)
    return normalizers.NFC(), split.Sequence([words, bytes_only])


# tokenizer.ggml.pre -> (normalizer, pre-tokenizer)
SPLITTERS: dict[str, Callable[[], Splitter]] = {
    "smollm": _split_smollm,
    "qwen2": _split_qwen2,
}


def read_weights(tensors: list[Any], family: Family, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights under their transformers names, without a tied LM head."""
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in tensors:
        name, part = target_name(tensor.name)
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if family.interleaved and part in heads:
            value = value.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).reshape(value.shape)
        weights[name] = value.to(torch.bfloat16).contiguous()
    head, embedding = weights.get("lm_head.weight"), weights["model.embed_tokens.weight"]
    if head is not None and same_matrix(head, embedding):
        # tied, but stored twice: the head is quantised with more bits
        weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    return weights


def same_matrix(one: Tensor, two: Tensor) -> bool:
    from torch.nn import functional as F

    sample = slice(None, None, max(1, len(one) // 1000))
    cosine = F.cosine_similarity(one[sample].float().flatten(), two[sample].float().flatten(), 0)
    return cosine.item() > SAME_MATRIX


def target_name(name: str) -> tuple[str, str]:
    """Return the transformers name, and the GGUF module name."""
    *parts, last = name.split(".")
    try:
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{last}", parts[2]
        return f"{OUTSIDE[parts[0]]}.{last}", parts[0]
    except (KeyError, IndexError):
        raise ValueError(
            f"It has a tensor {name!r}, which this converter does not support."
        ) from None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    args = parser.parse_args()
    try:
        make_folder(args.gguf, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"from_gguf: {error}")
    print(args.out)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("from_gguf", main))
