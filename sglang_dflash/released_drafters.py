"""Released DFlash drafters, for the table in docs/drafters.md.

Of each: what its config.json says beyond a plain drafter's, and its target.
Whether it is served follows from the checks that a server runs. From model cards and public
configs; `unseen` says where a config.json was not public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FAMILIES = "tests/e2e/test_families.py"
SPECULATORS = "tests/e2e/test_speculators.py"
DFLASH2_PAIR = "tests/e2e/test_dflash2.py"
PAIRS = "tests/e2e/test_released_pairs.py"

# as in z-lab's drafters for Qwen3
PLAIN: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 2]},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048}
_CONV_AND_SELECTOR = {
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "selector_rank": 256,
    "selector_top_k": 16,
}
DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "block_size": 8,
    "dflash_config": {**PLAIN["dflash_config"], **_CONV_AND_SELECTOR},
    "is_causal": False,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 2048,
}
# as in gpt-oss itself
GPT_OSS_LIKE = {
    "attention_bias": True,
    "block_size": 8,
    "initial_context_length": 4096,
    "model_type": "gpt_oss",
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
}
_LAYERS = ("architectures", "block_size", "dflash_config")
IN_SPECULATORS: dict[str, Any] = {
    "aux_hidden_state_layer_ids": [2, 3],
    "block_size": 8,
    "draft_vocab_size": 32000,
    "mask_token_id": 9,
    "speculators_model_type": "dflash",
    "transformer_layer_config": {k: v for k, v in PLAIN.items() if k not in _LAYERS},
}
DFLASH2_IN_SPECULATORS = {
    "draft_vocab_size": PLAIN["vocab_size"],
    "speculators_model_type": "dflash2",
    **_CONV_AND_SELECTOR,
}


@dataclass(frozen=True)
class Target:
    """A target's family, as its config.json names it."""

    model_type: str
    architecture: str
    # the text model's, where it is part of another
    text_type: str | None = None


LLAMA = Target("llama", "LlamaForCausalLM")
QWEN3 = Target("qwen3", "Qwen3ForCausalLM")
QWEN3_MOE = Target("qwen3_moe", "Qwen3MoeForCausalLM")
QWEN3_NEXT = Target("qwen3_next", "Qwen3NextForCausalLM")
QWEN3_5 = Target("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text")
QWEN3_5_MOE = Target("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text")
GPT_OSS = Target("gpt_oss", "GptOssForCausalLM")
MINIMAX_M2 = Target("minimax_m2", "MiniMaxM2ForCausalLM")


@dataclass(frozen=True, kw_only=True)
class Released:
    """A released drafter, or several of one kind."""

    names: str
    config: Mapping[str, Any] = field(default_factory=dict)  # replaces entries of PLAIN
    is_speculators: bool = False  # the config replaces entries of IN_SPECULATORS instead
    target: Target | None = None  # None where only the drafter is in question
    tested: str = ""  # where a tiny pair of this kind runs
    unseen: str = ""  # why the config.json is not known

    def config_json(self) -> dict[str, Any]:
        """Return a config.json of this kind."""
        return {**(IN_SPECULATORS if self.is_speculators else PLAIN), **self.config}


RELEASED = (
    Released(
        names="z-lab gemma-4-31B-it-DFlash, gemma-4-26B-A4B-it-DFlash",
        config=WINDOWS,
        tested=FAMILIES,
    ),
    Released(names="z-lab Qwen3-4B-DFlash-b16, Qwen3-8B-DFlash-b16", target=QWEN3, tested=FAMILIES),
    Released(names="z-lab Qwen3-Coder-30B-A3B-DFlash", target=QWEN3_MOE, tested=FAMILIES),
    Released(
        names="z-lab LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        target=LLAMA,
        tested="tests/e2e/test_drafters.py",
    ),
    Released(names="z-lab Qwen3.5-4B, 9B and 27B, Qwen3.6-27B", target=QWEN3_5, tested=FAMILIES),
    Released(
        names="z-lab Qwen3.5-35B-A3B and 122B-A10B, Qwen3.6-35B-A3B",
        target=QWEN3_5_MOE,
        tested=FAMILIES,
    ),
    Released(names="z-lab Qwen3-Coder-Next", target=QWEN3_NEXT, tested=FAMILIES),
    Released(
        names="z-lab gpt-oss-20b-DFlash, gpt-oss-120b-DFlash",
        config=GPT_OSS_LIKE,
        target=GPT_OSS,
        tested=FAMILIES,
    ),
    Released(
        names="z-lab MiniMax-M2.5, M2.7; nvidia MiniMax-M2.7-DFlash",
        target=MINIMAX_M2,
        tested=FAMILIES,
    ),
    Released(names="z-lab Kimi-K2.5, Kimi-K2.6", unseen="gated"),
    Released(
        names="poolside Laguna",
        config={"architectures": ["DFlashLagunaForCausalLM"], "gating": "per-head"},
    ),
    Released(
        names="XiaomiMiMo MiMo-V2.5-Pro-FP4-DFlash", unseen="it is in a folder of the target's"
    ),
    Released(
        names="RedHatAI Qwen3-8B-speculator.dflash",
        is_speculators=True,
        target=QWEN3,
        tested=SPECULATORS,
    ),
    Released(
        names="RedHatAI Qwen3-30B-A3B[-Instruct-2507]-speculator.dflash",
        is_speculators=True,
        target=QWEN3_MOE,
        tested=PAIRS,
    ),
    Released(
        names="RedHatAI gemma-4-31B-it-speculator.dflash",
        is_speculators=True,
        tested=SPECULATORS,
    ),
    Released(
        names="RedHatAI Qwen3.5-397B-A17B-speculator.dflash",
        is_speculators=True,
        target=QWEN3_5_MOE,
        tested=PAIRS,
    ),
    Released(
        names="RedHatAI DeepSeek-V4-Flash-speculator.dflash",
        is_speculators=True,
        config={
            "transformer_layer_config": {**IN_SPECULATORS["transformer_layer_config"], "hc_mult": 4}
        },
    ),
    Released(
        names="RedHatAI Qwen3-4B-speculator.dflash2, Qwen3-8B-speculator.dflash2",
        is_speculators=True,
        config=DFLASH2_IN_SPECULATORS,
        target=QWEN3,
        tested=DFLASH2_PAIR,
    ),
    Released(
        names="RedHatAI gemma-4-31B-it-speculator.dflash2",
        is_speculators=True,
        config=DFLASH2_IN_SPECULATORS,
        tested=PAIRS,
    ),
    Released(
        names="incoai and z-lab Qwen3.8-27B-DFlash2",
        config=DFLASH2,
        target=QWEN3_5,
        tested=PAIRS,
    ),
    Released(names="incoai and z-lab GLM-5.3-DFlash2, GLM-5.3-Flash-DFlash2", config=DFLASH2),
    Released(
        names="incoai and z-lab Muse-Glimmer-30B-DFlash2",
        config={
            **DFLASH2,
            "block_size": 16,
            "dflash_config": {
                **DFLASH2["dflash_config"],
                "final_logit_softcapping": 20.0,
                "output_multiplier": 0.196,
            },
        },
    ),
    Released(
        names="DFlash2 for GLM-5.3-Flash by canada-quant and jmeadlock",
        config=DFLASH2,
    ),
)
