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
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.pairs import tiny_target
from sglang_dflash.reference import Drafter, DrafterConfig
from tests.quantised_targets import UNQUANTISED, quantise

CLASSES = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3-moe": Qwen3MoeForCausalLM,
    "gemma4": Gemma4ForCausalLM,
    "gemma4-for-two": Gemma4ForCausalLM,
    "gemma4-moe": Gemma4ForCausalLM,
    "gpt-oss": GptOssForCausalLM,
    # its SGLang class has no method to capture features
    "granite": GraniteForCausalLM,
    # MLA: KV are latents, with one head for all queries; Kimi K2's class, too
    "deepseek": DeepseekV3ForCausalLM,
    "qwen3-next": Qwen3NextForCausalLM,
    "qwen3.5": Qwen3_5ForCausalLM,
}
# of a family's target, the format in which its linear layers are quantised
QUANTISED = {"gemma4-int4": ("gemma4", "int4"), "qwen3-awq": ("qwen3", "awq")}
NUM_LAYERS = 6
HIDDEN = 128
NUM_EXPERTS = 8
VOCAB = 1024
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": NUM_EXPERTS,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}

# two value heads for each key head, as in released models; two of three layers are linear
GATED_DELTA_NET: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}

# as in gpt-oss, but for shorter contexts
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 256,
}
# the first layer is dense; the last three keys are SGLang's, not transformers'
DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        **YARN,
        "rope_theta": 10000.0,
        "truncate": True,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# Gemma 4's sliding and full layers have different heads
HEAD_DIM, GLOBAL_HEAD_DIM = 32, 64
# KV heads of the global layers; for two ranks there must be two: on a CPU, SGLang pads the heads of
# all layers otherwise, and answers wrongly
GLOBAL_KV_HEADS = {"gemma4": 1, "gemma4-moe": 1, "gemma4-for-two": 2}
# configs of targets with recurrent states, for checks that need no weights
HYBRID_TEXT = {**COMMON, "head_dim": 32, "full_attention_interval": 3}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], **HYBRID_TEXT},
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {"model_type": "qwen3_5_text", **HYBRID_TEXT},
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {"model_type": "qwen3_5_moe_text", **HYBRID_TEXT},
    },
    "lfm2": {"architectures": ["Lfm2ForCausalLM"], **HYBRID_TEXT},
}


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
            if name.endswith(("router.proj.weight", "router.weight", "mlp.gate.weight")):
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


def hf_config(family: str) -> PreTrainedConfig:
    """Return the target's config as transformers reads it."""
    if family == "llama":
        return LlamaConfig(**COMMON, tie_word_embeddings=False)
    if family == "qwen2":
        return Qwen2Config(**COMMON, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True)
    if family == "qwen3-moe":
        return Qwen3MoeConfig(
            **COMMON,
            head_dim=32,
            tie_word_embeddings=False,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        )
    if family == "deepseek":
        return DeepseekV3Config(**{**COMMON, **DEEPSEEK}, tie_word_embeddings=False)
    if family == "granite":
        return GraniteConfig(
            **COMMON,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            logits_scaling=0.5,
            residual_multiplier=0.7,
            tie_word_embeddings=False,
        )
    if family == "gpt-oss":
        return GptOssConfig(
            **{**COMMON, "intermediate_size": 64},
            head_dim=32,
            layer_types=["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
            sliding_window=48,
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            swiglu_limit=7.0,
            tie_word_embeddings=False,
            rope_parameters={"rope_theta": 150000.0, **YARN},
        )
    if family == "qwen3-next":
        return Qwen3NextConfig(
            **COMMON,
            **GATED_DELTA_NET,
            tie_word_embeddings=False,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
    if family == "qwen3.5":
        return Qwen3_5TextConfig(**COMMON, **GATED_DELTA_NET, tie_word_embeddings=False)
    return Gemma4TextConfig(
        **COMMON,
        head_dim=HEAD_DIM,
        global_head_dim=GLOBAL_HEAD_DIM,
        num_global_key_value_heads=GLOBAL_KV_HEADS[family],
        attention_k_eq_v=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=48,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        final_logit_softcapping=30.0,
        **(EXPERTS if family == "gemma4-moe" else {"enable_moe_block": False}),
    )


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
