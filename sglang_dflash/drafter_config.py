"""The single list of supported keys of a drafter's config.json; anything else is rejected.

Shared by server, doctor, oracle and trainer. A switch that one of them ignored would silently cost
accept length, because the target corrects whatever a drafter proposes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash import dflash2_format, speculators_format

FULL, SLIDING = "full_attention", "sliding_attention"
SUPPORTED_LAYER_TYPES = (FULL, SLIDING)
NON_CAUSAL = "sliding_window_non_causal"
PLAIN = "DFlashDraftModel"
ARCHITECTURES = (PLAIN, dflash2_format.ARCHITECTURE)

# read, with any value
_READ = {
    "architectures",
    "block_size",
    "dflash_config",
    "draft_vocab_size",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "vocab_size",
}
# ignored, irrelevant to the network: tokens and softcap are the target's, layer_types defines the
# windows, and the rest is added by transformers, or by SGLang to a config it has loaded before
_IDLE = {
    "_attn_implementation",
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "context_len",
    "dtype",
    "eos_token_id",
    "final_logit_softcapping",
    "id2label",
    "initializer_range",
    "label2id",
    "max_window_layers",
    "model_type",
    "original_num_attention_heads",
    "original_total_num_kv_heads",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
}
# what a config class of the target's adds, for experts and layers that a drafter does not have
_IDLE_BY_TYPE = {
    "gpt_oss": {
        "experts_per_token",
        "initial_context_length",
        "num_experts_per_tok",
        "num_local_experts",
        "output_router_logits",
        "router_aux_loss_coef",
        "swiglu_alpha",
        "swiglu_limit",
    }
}
_READ_IN_DFLASH = {
    "block_size",
    "mask_token",
    "mask_token_id",
    "num_target_layers",
    "target_layer_ids",
}
_READ_IN_DFLASH2 = {*dflash2_format.SIZES, *dflash2_format.TRANSFORMS}


@dataclass(frozen=True)
class _Kind:
    """What a value must be."""

    words: str
    holds: Callable[[Any], bool]


def _whole(least: int) -> _Kind:
    # a bool is an int to Python, and never one to a config
    return _Kind(f"a whole number of {least} or more", lambda v: type(v) is int and v >= least)


def _list_of(words: str, kind: type) -> _Kind:
    return _Kind(
        f"a list of {words}",
        lambda v: isinstance(v, list | tuple) and all(type(each) is kind for each in v),
    )


_NUMBER = _Kind("a number of more than 0", lambda v: type(v) in (int, float) and 0 < v < math.inf)
_OBJECT = _Kind("an object", lambda v: isinstance(v, Mapping))
_WORD = _Kind("a word", lambda v: isinstance(v, str))
_WORDS = _list_of("words", str)
_LAYER_IDS = _list_of("whole numbers", int)
# what a key must be at any level of the config if it is given; null is as good as absent
_KINDS = {
    "architectures": _WORDS,
    # the last token and at least one draft
    "block_size": _whole(2),
    "dflash_config": _OBJECT,
    "draft_vocab_size": _whole(1),
    "factor": _NUMBER,
    "head_dim": _whole(1),
    "hidden_size": _whole(1),
    "intermediate_size": _whole(1),
    "layer_types": _WORDS,
    "mask_token_id": _whole(0),
    "max_position_embeddings": _whole(1),
    "num_attention_heads": _whole(1),
    "num_hidden_layers": _whole(1),
    "num_key_value_heads": _whole(1),
    "num_target_layers": _whole(1),
    "rms_norm_eps": _NUMBER,
    "rope_parameters": _OBJECT,
    "rope_scaling": _OBJECT,
    "rope_theta": _NUMBER,
    # some configs without such layers have a 0
    "sliding_window": _whole(0),
    "target_layer_ids": _LAYER_IDS,
    "vocab_size": _whole(1),
    # of the speculators format
    "aux_hidden_state_layer_ids": _LAYER_IDS,
    "speculators_config": _OBJECT,
    "speculators_model_type": _WORD,
    "transformer_layer_config": _OBJECT,
    "verifier": _OBJECT,
}
# the levels, each by the keys that lead there
_LEVELS = (
    (),
    ("dflash_config",),
    ("rope_parameters",),
    ("rope_scaling",),
    ("speculators_config",),
    ("speculators_config", "verifier"),
    ("transformer_layer_config",),
)


def _understood_values(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the supported values of each switch, at whichever level of the config it appears."""
    dflash = config.get("dflash_config") or {}
    kinds = set(config.get("layer_types") or [FULL])
    # full layers are bidirectional within the block, sliding ones causal unless stated otherwise
    causal = (False,) if FULL in kinds or dflash.get(NON_CAUSAL) else (True, False)
    window = (config.get("sliding_window"),)
    width = (config.get("head_dim"),)
    return {
        "attention_bias": (True, False),
        "attention_mode": ("gqa", "mha"),
        "causal": causal,
        "hidden_act": ("silu",),
        "input_embedding_scale": (1.0,),
        "is_causal": causal,
        "is_neox_style": (True,),
        "mask_token_id": (dflash.get("mask_token_id"),),
        "mlp_bias": (False,),
        "output_multiplier": (1.0,),
        "partial_rotary_factor": (1.0,),
        "projector_type": ("dflash",),
        "qk_norm": (True,),
        "rope_is_neox_style": (True,),
        # a selector walks from the anchor to the token of the next row
        "sample_from_anchor": (False,) if dflash2_format.describes(config) else (True, False),
        "scale_embedding": (True, False),
        "sliding_window": window,
        NON_CAUSAL: (True, False),
        "swa_head_dim": width,
        "swa_v_head_dim": width,
        "swa_window_size": window,
        "target_layer_ids": (dflash.get("target_layer_ids"),),
        "use_aux_hidden_state": (True,),
        "use_qk_norm": (True,),
        "use_swa": (False,),
        "v_head_dim": width,
    }


def read(config: Mapping[str, Any], *, name: str) -> Mapping[str, Any]:
    """Return a drafter's config in the released format, from either format. Raise ValueError
    listing every unsupported key and value."""
    refuse_other_kinds(config, name=name)
    if speculators_format.describes(config):
        config = speculators_format.translate(config, name=name)
    _refuse_odd_heads(config, name=name)
    refuse_unknown(config, name=name)
    return config


def own_vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of the drafter's own, reduced vocabulary; None if it uses the target's."""
    size = config.get("draft_vocab_size")
    return None if size in (None, config.get("vocab_size")) else int(size)


def has_causal_windows(config: Mapping[str, Any]) -> bool:
    """Return whether sliding-window layers are causal within the block."""
    dflash = config.get("dflash_config") or {}
    said = [level.get(key) for level in (config, dflash) for key in ("causal", "is_causal")]
    return not _says(config, NON_CAUSAL) and False not in said


def samples_from_anchor(config: Mapping[str, Any]) -> bool:
    """Return whether row k of a block predicts the token after it, starting with the anchor's,
    instead of its own token."""
    return _says(config, "sample_from_anchor")


def scales_embedding(config: Mapping[str, Any]) -> bool:
    """Return whether block tokens are embedded with the scaling that some targets apply."""
    return (config.get("dflash_config") or {}).get("scale_embedding") is not False


def _says(config: Mapping[str, Any], key: str) -> bool:
    return any(level.get(key) is True for level in (config, config.get("dflash_config") or {}))


def refuse_other_kinds(config: Any, *, name: str) -> None:
    """Raise ValueError listing every value in a drafter's config.json, of either format, that is of
    another kind than its key demands. The file may hold any JSON."""
    if not isinstance(config, Mapping):
        raise ValueError(
            f"The config.json of the drafter {name} holds {_shortened(config)}, not an object. "
            "Download it again, or pass a drafter's folder."
        )
    wrong = []
    for keys in _LEVELS:
        level: Any = config
        for key in keys:
            level = level.get(key) if isinstance(level, Mapping) else None
        # a level of another kind is listed where it is a value
        if isinstance(level, Mapping):
            wrong += [
                f"{'.'.join((*keys, key))} is {_shortened(level[key])}, not {kind.words}"
                for key, kind in _KINDS.items()
                if level.get(key) is not None and not kind.holds(level[key])
            ]
    _refuse(wrong, name=name)


def _refuse_odd_heads(config: Mapping[str, Any], *, name: str) -> None:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    width = config.get("head_dim")
    if width is None and heads and config.get("hidden_size"):
        width = config["hidden_size"] // heads
    wrong = []
    if heads and kv_heads and heads % kv_heads:
        wrong.append(f"{heads} num_attention_heads cannot share {kv_heads} num_key_value_heads")
    # RoPE rotates one half of a head against the other
    if width is not None and (width < 2 or width % 2):
        wrong.append(f"its heads have {width} values, not a multiple of 2")
    _refuse(wrong, name=name)


def _refuse(wrong: list[str], *, name: str) -> None:
    if wrong:
        raise ValueError(
            f"The config.json of the drafter {name} cannot be right: {'; '.join(wrong)}. Correct "
            "it, or download it again."
        )


def refuse_unknown(config: Mapping[str, Any], *, name: str) -> None:
    """Raise ValueError listing every unsupported key and value of a drafter's config."""
    found = list(_unknown(config))
    if found:
        raise ValueError(
            f"The config.json of the drafter {name} asks for settings that sglang_dflash does not "
            f"support: {', '.join(found)}. Use a drafter without them "
            f"({' or '.join(ARCHITECTURES)}), or remove keys that do not affect the network."
        )


def _unknown(config: Mapping[str, Any]) -> Iterator[str]:
    is_dflash2 = dflash2_format.describes(config)
    architectures = config.get("architectures")
    if architectures and (len(architectures) > 1 or architectures[0] not in ARCHITECTURES):
        yield f"architectures {architectures}"
    if is_dflash2 and own_vocab_size(config) is not None:
        yield f"draft_vocab_size {own_vocab_size(config)}"
    switches = _understood_values(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotated = {k: v for k, v in rope.items() if k in switches}
    in_dflash = _READ_IN_DFLASH | (_READ_IN_DFLASH2 if is_dflash2 else set())
    idle = _IDLE | _IDLE_BY_TYPE.get(config.get("model_type", ""), set())
    levels: list[tuple[str, Mapping[str, Any], set[str]]] = [
        ("", config, _READ | idle),
        ("dflash_config.", config.get("dflash_config") or {}, in_dflash),
        ("rope_parameters.", rotated, set()),
    ]
    for level, keys, known in levels:
        for key, value in keys.items():
            if key not in known and not _is_understood(key, value, switches):
                yield f"{level}{key} {_shortened(value)}"


def _is_understood(key: str, value: Any, switches: Mapping[str, tuple[Any, ...]]) -> bool:
    if value is None:
        return True
    if key in switches:
        return value in switches[key]
    # an unknown feature that is off
    return value is False or value in ("", [], {}, ())


def _shortened(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
