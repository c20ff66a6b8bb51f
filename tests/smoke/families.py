"""The model families of the recipes, at their real head shapes, with few layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.dflash2_format import SIZES
from sglang_dflash.released_drafters import DFLASH2
from tests.quantised_targets import AWQ, INT4

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"
# SGLang captures a layer's output as the input of the next
FEATURE_LAYERS = [0, 1, 2]
NUM_LAYERS = 4
DRAFT_LAYERS = 2
# small enough for a CPU: the same architecture, narrow
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
SMALL_GEMMA: dict[str, Any] = {
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "swa_num_key_value_heads": 2,
    "v_head_dim": 32,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "vocab_size_per_layer_input": 2048,
}
SMALL_MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
SMALL_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# in fp32: reduced sizes where attention heads are not concerned, so that all families fit on one
# GPU together. Experts in plain torch are computed one after another
FP32: dict[str, Any] = {
    "vocab_size": 32768,
    "vocab_size_per_layer_input": 32768,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "top_k_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
# in bf16, all sizes are real but these, for the same reason
FEWER_EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
}
# experts in bf16: MXFP4 would have no exact counterpart. In fp32, windows are longer than any
# sequence: SGLang's plain decoding reads one key fewer than a window holds. Its class takes the
# dtype from here
GPT_OSS_FP32: dict[str, Any] = {
    "intermediate_size": 256,
    "sliding_window": 1024,
    "dtype": "float32",
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "vocab_size": 151936,
    "dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# the text model of Qwen3.5-9B: three layers with linear attention, then one with full attention
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "vocab_size": 248320,
    "dtype": "bfloat16",
    "bos_token_id": 248043,
    "eos_token_id": 248044,
}

# Granite 3.3 8B: SGLang's class has no method to capture features, so hooks of ours do. With random
# weights its own tied head and multipliers repeat the last token, whatever the context
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.22,
    "max_position_embeddings": 32768,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "vocab_size": 49159,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# DeepSeek V3, whose class Kimi K2 shares: the heads of one rank of eight, over narrower layers
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "vocab_size": 129280,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# as most GPTQ checkpoints are published, and those in compressed-tensors' FP8-dynamic scheme
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "true_sequential": True,
    "lm_head": False,
}
_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
FP8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True},
        }
    },
}


@dataclass(frozen=True)
class Family:
    """A target's architecture. `shapes` names a folder of benchmarks/shapes for target and
    drafter; `own` replaces the target's config if no recipe serves this family; `quantisation` is
    that of a released target."""

    name: str
    shapes: str
    own: dict[str, Any] = field(default_factory=dict)
    has_dflash2: bool = False
    quantisation: Mapping[str, Any] | None = None
    # whether its deployed server has a drafter with FP8 weights
    has_fp8_drafter: bool = False
    # and one whose draft KV is in FP8, where SGLang has such an option
    has_fp8_draft_kv: bool = False

    @property
    def is_gemma(self) -> bool:
        return self.name.startswith("gemma4")

    @property
    def is_gpt_oss(self) -> bool:
        return self.name == "gpt-oss"

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a recurrent state instead of KV."""
        return "linear_num_key_heads" in self.own

    @property
    def has_experts(self) -> bool:
        return self.name.endswith("moe") or self.is_gpt_oss

    @property
    def is_compiled(self) -> bool:
        """Whether SGLang compiles kernels for it with the CUDA toolkit, on first use."""
        return self.quantisation is not None or self.has_mla

    @property
    def flips_often(self) -> bool:
        """Whether two runs often differ by more than a near-tie: where activations are rounded to
        FP8, and where rounding errors choose other experts of many."""
        return self.quantisation is FP8 or self.has_mla

    @property
    def has_mla(self) -> bool:
        """Whether SGLang's kernel verifies, which takes full blocks."""
        return "kv_lora_rank" in self.own

    def write_target(self, folder: Path, *, fp32: bool, small: bool = False) -> Path:
        """Write the target's config and return its folder."""
        config = {**(self.own or _read(self.shapes)), "num_hidden_layers": NUM_LAYERS}
        config.pop("quantization_config", None)
        if self.quantisation is not None:
            config["quantization_config"] = self.quantisation
        if self.is_gemma or self.is_gpt_oss:
            config["layer_types"] = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
        smaller = FP32 if fp32 else FEWER_EXPERTS
        config |= {key: value for key, value in smaller.items() if key in config}
        if fp32 and self.is_gpt_oss:
            config |= GPT_OSS_FP32
        if small:
            config |= SMALL | (SMALL_GEMMA if self.is_gemma else {})
            config |= SMALL_LINEAR if self.has_states else {}
            config |= SMALL_MLA if self.has_mla else {}
        return _write(config, folder)

    def write_drafter(self, folder: Path, *, fp32: bool, small: bool = False) -> Path:
        """Write the config of a drafter that fits the target, and return its folder."""
        target = self.own or _read(self.shapes)
        config = _read(f"{self.shapes}-draft")
        config |= {
            "num_hidden_layers": DRAFT_LAYERS,
            "layer_types": config["layer_types"][-DRAFT_LAYERS:],
            "max_window_layers": DRAFT_LAYERS,
            # the checks' scripted drafts are whole blocks of sixteen
            "block_size": 16,
            "num_target_layers": NUM_LAYERS,
            "hidden_size": target["hidden_size"],
            "vocab_size": FP32["vocab_size"] if fp32 else target["vocab_size"],
            "max_position_embeddings": max(
                config["max_position_embeddings"], target["max_position_embeddings"]
            ),
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": FEATURE_LAYERS},
        }
        if self.has_dflash2:
            config |= {key: DFLASH2[key] for key in ("architectures", "is_causal")}
            config["dflash_config"] |= {key: DFLASH2["dflash_config"][key] for key in SIZES}
        if small:
            config |= SMALL
        return _write(config, folder)


# those that take longest come first
FAMILIES = [
    Family("gemma4", "gemma4-31b"),
    Family("gemma4-moe", "gemma4-26b-a4b"),
    Family("qwen3-moe", "qwen3-coder-30b-a3b"),
    Family("qwen3", "qwen3-8b", has_fp8_drafter=True),
    Family("gpt-oss", "gpt-oss-20b"),
    Family("qwen3.5", "qwen3-8b", QWEN3_5),
    Family("granite", "qwen3-8b", GRANITE),
    Family("qwen2", "qwen3-8b", QWEN2, has_fp8_draft_kv=True),
    Family("llama", "llama-3.1-8b"),
    Family("dflash2", "qwen3-4b", has_dflash2=True),
    Family("gemma4-int4", "gemma4-31b", quantisation=INT4),
    Family("qwen3-awq", "qwen3-8b", quantisation=AWQ),
    Family("qwen3-gptq", "qwen3-8b", quantisation=GPTQ),
    Family("llama-fp8", "llama-3.1-8b", quantisation=FP8),
    Family("deepseek-moe", "qwen3-8b", DEEPSEEK),
]


def _read(name: str) -> dict[str, Any]:
    return json.loads((SHAPES / name / "config.json").read_text())


def _write(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
