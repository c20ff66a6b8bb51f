"""The pairs that have a recipe: the target, its drafter, and 4-bit forms of the target.

Configs state what the size of weights and KV depends on, so that a card can be planned for without
a network; `benchmarks/shapes` has them in full. In order of preference, larger targets first.
A 4-bit form is listed if its repository is public and SGLang's code has the kernels for it. None
of them has been run yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class SmallRecipe:
    """A script in launch/ for one size of card."""

    script: str
    size_gb: int
    kv_dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A form in which a target's weights are published."""

    target: str
    kind: str = "bf16"
    # what its config.json says beyond, or in place of, the unquantised target's
    config: Config = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # that a server needs for it
    has_listed_towers: bool = False  # SGLang cannot load it as it is: commands/plain_towers.py
    capability: tuple[int, int] = (8, 0)  # the lowest on which SGLang has kernels for it
    published_gib: float | None = None  # the size of its files, where it is known
    small_recipe: SmallRecipe | None = None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafter."""

    recipe: str
    drafter: str
    config: Config
    draft_config: Config
    forms: tuple[Weights, ...]  # the most exact first
    sliding_share: float = 0.8
    fraction_80gb: float = 0.85


def _drafter(target: Config, *, layers: int = 5, features: list[int], **other: Any) -> Config:
    """Return a drafter's config; its features come from these layers of the target."""
    text = target.get("text_config", target)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": features},
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": text["max_position_embeddings"],
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_target_layers": text["num_hidden_layers"],
        "vocab_size": text["vocab_size"],
        **other,
    }


def _qwen3(**other: Any) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        **other,
    }


def _gemma4(**text: Any) -> Config:
    """Return a Gemma 4 config with its tower for images."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": None,
        "tie_word_embeddings": True,
        "vision_config": {
            "model_type": "gemma4_vision",
            "global_head_dim": 72,
            "head_dim": 72,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
        },
        "text_config": {
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size_per_layer_input": 0,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"])
            * (text["num_hidden_layers"] // 6),
            "max_position_embeddings": 262144,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
            **text,
        },
    }


def _awq(group_size: int) -> Config:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True}


def _int4(group_size: int, *ignored: str) -> Config:
    """Return a compressed-tensors config: symmetric 4-bit integers, bf16 scales."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**weights, "group_size": group_size}}
        },
        "ignore": ["lm_head", *ignored],
    }


WINDOWS = ["sliding_attention"] * 4 + ["full_attention"]
GEMMA_31B = _gemma4(
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_global_key_value_heads=4,
    num_hidden_layers=60,
    num_key_value_heads=16,
)
GEMMA_INT4 = _int4(32, "re:.*vision_tower.*", "re:.*embed_vision.*")
GEMMA_26B = _gemma4(
    enable_moe_block=True,
    hidden_size=2816,
    intermediate_size=2112,
    moe_intermediate_size=704,
    num_attention_heads=16,
    num_experts=128,
    num_global_key_value_heads=2,
    num_hidden_layers=30,
    num_key_value_heads=8,
    top_k_experts=8,
)
GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
    "vocab_size": 201088,
}
QWEN3_CODER: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
QWEN3_8B = _qwen3(hidden_size=4096, intermediate_size=12288)
QWEN3_4B = _qwen3(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}

PAIRS = (
    Pair(
        recipe="gemma4-31b",
        drafter="z-lab/gemma-4-31B-it-DFlash",
        config=GEMMA_31B,
        draft_config=_drafter(
            GEMMA_31B,
            features=[1, 12, 23, 35, 46, 57],
            intermediate_size=10752,
            layer_types=WINDOWS,
            num_attention_heads=64,
            sliding_window=2048,
            use_sliding_window=True,
        ),
        sliding_share=0.2,
        fraction_80gb=0.9,
        forms=(
            Weights(target="google/gemma-4-31B-it"),
            Weights(
                target="google/gemma-4-31B-it-qat-w4a16-ct",
                kind="4-bit (QAT)",
                # its files have the head apart from the embeddings, both in bf16
                config={"quantization_config": GEMMA_INT4, "tie_word_embeddings": False},
                has_listed_towers=True,
                published_gib=21.67,
                small_recipe=SmallRecipe("gemma4-31b-32gb.sh", 32, "fp8_e4m3"),
            ),
        ),
    ),
    Pair(
        recipe="gemma4-26b-a4b",
        drafter="z-lab/gemma-4-26B-A4B-it-DFlash",
        config=GEMMA_26B,
        draft_config=_drafter(
            GEMMA_26B,
            features=[1, 6, 11, 17, 22, 27],
            intermediate_size=5632,
            layer_types=WINDOWS,
            sliding_window=2048,
            use_sliding_window=True,
        ),
        sliding_share=0.2,
        forms=(
            Weights(target="google/gemma-4-26B-A4B-it"),
            Weights(
                target="nvidia/Gemma-4-26B-A4B-NVFP4",
                kind="4-bit (NVFP4)",
                # only its experts are quantised
                config={
                    "quantization_config": {
                        "quant_method": "modelopt",
                        "quant_algo": "NVFP4",
                        "ignore": ["*self_attn*", "*.mlp.*", "*router*", "*vision*", "lm_head"],
                    }
                },
                arguments=("--quantization", "modelopt_fp4"),
                # SGLang's NVFP4 kernels for earlier cards have no GELU
                capability=(10, 0),
                published_gib=17.5,
                small_recipe=SmallRecipe("gemma4-26b-a4b-32gb.sh", 32),
            ),
        ),
    ),
    Pair(
        recipe="gpt-oss-20b",
        drafter="z-lab/gpt-oss-20b-DFlash",
        config=GPT_OSS_20B,
        draft_config=_drafter(
            GPT_OSS_20B,
            layers=8,
            features=[1, 6, 11, 16, 21],
            attention_bias=True,
            block_size=8,
            head_dim=64,
            intermediate_size=7680,
            model_type="gpt_oss",
            num_attention_heads=64,
        ),
        sliding_share=0.2,
        forms=(Weights(target="openai/gpt-oss-20b", kind="4-bit (MXFP4)", published_gib=12.8),),
    ),
    Pair(
        recipe="qwen3-coder-30b-a3b",
        drafter="z-lab/Qwen3-Coder-30B-A3B-DFlash",
        config=QWEN3_CODER,
        draft_config=_drafter(
            QWEN3_CODER,
            layers=8,
            features=[1, 12, 23, 34, 45],
            intermediate_size=6144,
            num_key_value_heads=4,
        ),
        fraction_80gb=0.9,
        forms=(
            Weights(target="Qwen/Qwen3-Coder-30B-A3B-Instruct"),
            Weights(
                target="cyankiwi/Qwen3-Coder-30B-A3B-Instruct-AWQ-4bit",
                kind="4-bit (AWQ)",
                config={"quantization_config": _int4(32, r"re:.*mlp\.gate$")},
                published_gib=16.86,
            ),
        ),
    ),
    Pair(
        recipe="qwen3-8b",
        drafter="z-lab/Qwen3-8B-DFlash-b16",
        config=QWEN3_8B,
        draft_config=_drafter(QWEN3_8B, features=[1, 9, 17, 25, 33], intermediate_size=12288),
        forms=(
            Weights(target="Qwen/Qwen3-8B"),
            Weights(
                target="Qwen/Qwen3-8B-AWQ",
                kind="4-bit (AWQ)",
                config={"quantization_config": _awq(128)},
                published_gib=5.71,
                small_recipe=SmallRecipe("qwen3-8b-24gb.sh", 24),
            ),
        ),
    ),
    Pair(
        recipe="llama-3.1-8b",
        drafter="z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        config=LLAMA_8B,
        draft_config=_drafter(
            LLAMA_8B, features=[1, 8, 15, 22, 29], block_size=10, intermediate_size=14336
        ),
        forms=(
            Weights(target="meta-llama/Llama-3.1-8B-Instruct"),
            Weights(
                target="hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
                kind="4-bit (AWQ)",
                config={"quantization_config": _awq(128)},
            ),
        ),
    ),
    Pair(
        recipe="qwen3-4b",
        drafter="z-lab/Qwen3-4B-DFlash-b16",
        config=QWEN3_4B,
        draft_config=_drafter(QWEN3_4B, features=[1, 9, 17, 25, 33], intermediate_size=9728),
        forms=(
            Weights(target="Qwen/Qwen3-4B"),
            Weights(
                target="Qwen/Qwen3-4B-AWQ",
                kind="4-bit (AWQ)",
                config={"quantization_config": _awq(128)},
            ),
        ),
    ),
)
