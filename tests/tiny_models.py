"""Random models with the architectures of real ones, for tests that need no good answers.

Weights are drawn wide enough that the top two logits are almost never within rounding error.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config

from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.pairs import tiny_target
from sglang_dflash.reference import Drafter, DrafterConfig
from tests.quantised_targets import UNQUANTISED, quantise
from tests.tiny_configs import (
    CLASSES,
    COMMON,
    GLOBAL_HEAD_DIM,
    GLOBAL_KV_HEADS,
    HEAD_DIM,
    HIDDEN,
    HYBRIDS,
    IMAGES,
    NUM_LAYERS,
    QUANTISED,
    VOCAB,
    WITH_VISION,
    YARN,
    hf_config,
)


def make_target(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a random target of a family, with the embedded pair's tokenizer."""
    torch.manual_seed(seed)
    family, format_name = QUANTISED.get(family, (family, ""))
    model = CLASSES[family](hf_config(family))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                # wide weights: a random model must not be nearly tied everywhere
                param.normal_(std=0.08)
            if name.endswith(
                ("router.proj.weight", "router.weight", "mlp.gate.weight", "moe.gate.weight")
            ):
                # Gemma 4 scales the router's input by 1 / sqrt(hidden size)
                param.normal_(std=1.0)
            if name.endswith("scale"):
                param.uniform_(0.5, 1.5)
            if name.endswith("A_log"):
                # some heads remember hundreds of tokens, others a few
                param.uniform_(-6.0, 0.0)
            if name.endswith("sinks"):
                # a large share of the attention; SGLang has them in bf16
                param.copy_(param.uniform_(0.0, 4.0).bfloat16())
    model.float().eval().save_pretrained(folder)
    if family.startswith("gemma4"):
        _write_sglang_gemma4_keys(folder / "config.json", GLOBAL_KV_HEADS[family])
    if format_name:
        quantise(folder, format_name)
    if family in WITH_VISION:
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
        (folder / "video_preprocessor_config.json").write_text(json.dumps(IMAGES))
    _copy_tokenizer(folder)
    return folder


def write_hybrid_config(folder: Path, model_type: str) -> Path:
    """Write the config of a target with linear attention, and a tokenizer."""
    folder.mkdir()
    config = {"model_type": model_type, **HYBRIDS[model_type]}
    (folder / "config.json").write_text(json.dumps(config))
    _copy_tokenizer(folder)
    return folder


def make_drafter(folder: Path, *, seed: int = 1, prefix: str = "", **changes: Any) -> Path:
    """Write a random drafter that fits the targets above; `prefix` is prepended to tensor names."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "block_size": 16,
        "num_target_layers": NUM_LAYERS,
        "mask_token_id": 2,
        "target_layer_ids": (1, 3, 4),
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 40,
    }
    drafter = Drafter(DrafterConfig(**{**settings, **changes}))
    drafter.save_pretrained(folder)
    if prefix:
        path = folder / "model.safetensors"
        save_file({prefix + name: tensor for name, tensor in load_file(path).items()}, path)
    return folder


def make_dflash2_drafter(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Write a random DFlash2 drafter with convolutions and a selector that matter."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "block_size": 8,
        "causal_windows": False,
        "dflash2": DFlash2(conv_taps=2, conv_group_size=16, selector_rank=16, selector_top_k=8),
        "layer_types": ("sliding_attention", "sliding_attention"),
    }
    make_drafter(folder, seed=seed, **{**settings, **changes})
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if name.endswith(("base_kernel", "kernel_projection.weight")):
            weights[name] = tensor + 0.1 * torch.randn_like(tensor)
        if name.endswith("codebook"):
            weights[name] = torch.randn_like(tensor)
    save_file(weights, path)
    return folder


def make_gpt_oss_drafter(folder: Path) -> Path:
    """Write a drafter like those of gpt-oss: with biases, YaRN, and the target's type of config."""
    make_drafter(folder, attention_bias=True, rope_theta=150000.0, rope_scaling=YARN)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "gpt_oss", "initial_context_length": 256, "swiglu_limit": 7.0}
    path.write_text(json.dumps(config))
    return folder


def make_speculators_drafter(
    folder: Path, *, tokens: int = VOCAB, seed: int = 1, **changes: Any
) -> Path:
    """Write a random drafter in the speculators format, with a head of its own for `tokens` of the
    vocabulary. `changes` are keys of its config."""
    torch.manual_seed(seed)
    kinds = ["sliding_attention", "full_attention"]
    layers = Qwen3Config(
        **{**COMMON, "num_hidden_layers": 2},
        head_dim=32,
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=40,
    )
    config = {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 16,
        "draft_vocab_size": tokens,
        "mask_token_id": 2,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 15}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layers.to_diff_dict(),
        **changes,
    }
    # the names of the layers are the same in both formats
    weights = Drafter(DrafterConfig.from_json(config)).state_dict()
    if tokens < VOCAB:
        drafted = torch.randperm(VOCAB)[:tokens].sort().values
        weights["d2t"] = drafted - torch.arange(tokens)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, drafted, True)
    else:
        # written by some releases, and the target's
        for name in ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"):
            weights[name] = torch.full((VOCAB, HIDDEN), torch.nan)
        weights["verifier_norm.weight"] = torch.full((HIDDEN,), torch.nan)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
    )
    return folder


def load_target(family: str, folder: Path) -> PreTrainedModel:
    """Load a target in transformers, fp32; a quantised one with its rounded weights."""
    if family in QUANTISED:
        family, folder = QUANTISED[family][0], folder / UNQUANTISED
    config = hf_config(family)
    return CLASSES[family].from_pretrained(folder, config=config, dtype=torch.float32).eval()


def _copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_target() / name).exists():
            shutil.copy(tiny_target() / name, folder / name)


def _write_sglang_gemma4_keys(path: Path, global_kv_heads: int) -> None:
    """Write the two head shapes under the keys that SGLang reads for a text-only Gemma 4."""
    config = json.loads(path.read_text())
    # newer transformers write them layer by layer, and ask for the global ones again
    config.pop("per_layer_config", None)
    config |= {
        "swa_head_dim": HEAD_DIM,
        "swa_v_head_dim": HEAD_DIM,
        "swa_num_key_value_heads": COMMON["num_key_value_heads"],
        "head_dim": GLOBAL_HEAD_DIM,
        "v_head_dim": GLOBAL_HEAD_DIM,
        "global_head_dim": GLOBAL_HEAD_DIM,
        "num_key_value_heads": global_kv_heads,
        "num_global_key_value_heads": global_kv_heads,
    }
    path.write_text(json.dumps(config, indent=2))
