"""The configs of random models with the architectures of real ones (`tiny_models.py`)."""

from __future__ import annotations

from typing import Any

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
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

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
    # as released, with a vision tower
    "qwen3.5-vision": Qwen3_5ForConditionalGeneration,
    "qwen3.5-moe": Qwen3_5MoeForConditionalGeneration,
    "minimax-m2": MiniMaxM2ForCausalLM,
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

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
# families that have it, and how images would be prepared for it
WITH_VISION = ("qwen3.5-vision", "qwen3.5-moe")
IMAGES: dict[str, Any] = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
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
    if family == "minimax-m2":
        return MiniMaxM2Config(
            **{**COMMON, "intermediate_size": 64},
            head_dim=32,
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
            # SGLang's names
            rotary_dim=16,
            rope_theta=10000.0,
            scoring_func="sigmoid",
            use_routing_bias=True,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            attn_type_list=[1] * NUM_LAYERS,
        )
    if family == "qwen3.5-moe":
        common = {key: size for key, size in COMMON.items() if key != "intermediate_size"}
        moe = Qwen3_5MoeTextConfig(
            **common,
            **GATED_DELTA_NET,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
        return Qwen3_5MoeConfig(
            text_config=moe.to_dict(), vision_config=VISION, tie_word_embeddings=False
        )
    if family == "qwen3.5-vision":
        text = hf_config("qwen3.5").to_dict()
        return Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
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
