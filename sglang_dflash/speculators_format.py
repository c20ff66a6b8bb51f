"""Read the config of a drafter in the format of vLLM's speculators library, and write one.

The same network under other names. What differs: a layer id counts the embedding as 0, so it is one
higher; the embedding of block tokens is not scaled; and the drafter may have a head of its own for
a part of the target's vocabulary, with `d2t[i]` the distance of its token i to the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sglang_dflash import dflash2_format
from sglang_dflash.dflash2_format import DFlash2

MODEL_TYPE = "speculators_model_type"
# the version whose reader the written configs are tested with
VERSION = "0.9.0"
# the library's types of models that are drafters of this kind
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": dflash2_format.ARCHITECTURE}
# tensors that the library writes in some releases and takes from the target when it reads them
TARGETS_OWN = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
# the same if the drafter has the target's whole vocabulary
HEAD, OFFSETS, IS_DRAFTED = "lm_head.weight", "d2t", "t2d"
# read here, or irrelevant to the network
_CONSUMED = (
    MODEL_TYPE,
    "architectures",
    "aux_hidden_state_layer_ids",
    *dflash2_format.SIZES,
    "mask_token_id",
    "max_anchors",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_version",
    "target_hidden_size",
    "transformer_layer_config",
)
# keys of the released format that are not the layers'
_NOT_OF_LAYERS = (
    "architectures",
    "auto_map",
    "block_size",
    "causal",
    "dflash_config",
    "draft_vocab_size",
    "is_causal",
    "mask_token_id",
    "num_target_layers",
    "sample_from_anchor",
    "target_layer_ids",
)


Tensor = TypeVar("Tensor")


def describes(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is in this format."""
    return MODEL_TYPE in config


def is_targets_own(tensor: str, *, whole_vocabulary: bool) -> bool:
    """Return whether a tensor of a checkpoint is a copy of the target's, or follows from others."""
    if tensor in TARGETS_OWN or tensor == IS_DRAFTED:
        return True
    return whole_vocabulary and tensor in (HEAD, OFFSETS)


def drafters_own(weights: Mapping[str, Tensor], *, whole_vocabulary: bool) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that are the drafter's own."""
    return {
        name: tensor
        for name, tensor in weights.items()
        if not is_targets_own(name, whole_vocabulary=whole_vocabulary)
    }


def translate(config: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return the config of the released format. Raise ValueError for another method than DFlash,
    and for features that no layer of the target delivers."""
    kind = config[MODEL_TYPE]
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"The drafter {name} is a speculators model of type {kind!r}; sglang_dflash serves "
            f"{' and '.join(map(repr, ARCHITECTURES))}. Use a DFlash drafter for this target."
        )
    is_dflash2 = kind == "dflash2"
    sizes = {key: config[key] for key in dflash2_format.SIZES if key in config}
    layers = _layers(config, name)
    size = config.get("target_hidden_size")
    if size not in (None, layers["hidden_size"]):
        raise ValueError(
            f"The drafter {name} reads features of size {size} but has hidden size "
            f"{layers['hidden_size']}; sglang_dflash serves equal sizes only."
        )
    return {
        **layers,
        **{key: value for key, value in config.items() if key not in _CONSUMED},
        "architectures": [ARCHITECTURES[kind]],
        # what counts is the type of each layer
        "use_sliding_window": "sliding_attention" in (layers.get("layer_types") or ()),
        "dflash_config": {
            "mask_token_id": _required(config, "mask_token_id", name),
            "sample_from_anchor": bool(config.get("sample_from_anchor")),
            "scale_embedding": False,
            # DFlash2's default differs
            "sliding_window_non_causal": bool(config.get("sliding_window_non_causal", is_dflash2)),
            "target_layer_ids": _target_layer_ids(config, name),
            **sizes,
        },
    }


def written(
    config: Mapping[str, Any],
    *,
    target: str,
    target_architectures: Sequence[str],
    target_layer_ids: Sequence[int],
    block_size: int,
    mask_token_id: int,
    sample_from_anchor: bool,
    non_causal_windows: bool,
    dflash2: DFlash2 | None = None,
) -> dict[str, Any]:
    """Return the config.json of this format, from one of the released format."""
    layers = {key: value for key, value in config.items() if key not in _NOT_OF_LAYERS}
    drafts = block_size if sample_from_anchor else block_size - 1
    kind, architecture, sizes = "dflash", "DFlashSpeculator", {}
    if dflash2 is not None:
        kind, architecture, sizes = "dflash2", dflash2_format.ARCHITECTURE, dflash2.to_json()
    return {
        MODEL_TYPE: kind,
        "speculators_version": VERSION,
        "architectures": [architecture],
        "aux_hidden_state_layer_ids": [i + 1 for i in target_layer_ids],
        "block_size": block_size,
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "mask_token_id": mask_token_id,
        "sample_from_anchor": sample_from_anchor,
        "sliding_window_non_causal": non_causal_windows,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"architectures": list(target_architectures), "name_or_path": target},
        },
        "transformer_layer_config": {**layers, "model_type": "qwen3"},
        **sizes,
    }


def _layers(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the config of the layers with the defaults that the format leaves out."""
    from transformers import AutoConfig

    given = dict(_required(config, "transformer_layer_config", name))
    given.pop("architectures", None)
    kind = given.pop("model_type", "qwen3")
    try:
        filled = AutoConfig.for_model(kind, **given).to_dict()
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The transformer_layer_config of the drafter {name} cannot be read as {kind!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    # the library runs layers of Qwen3, whatever the type
    return {**filled, "model_type": "qwen3"}


def _target_layer_ids(config: Mapping[str, Any], name: str) -> list[int]:
    ids = _required(config, "aux_hidden_state_layer_ids", name)
    if min(ids) < 1:
        raise ValueError(
            f"The drafter {name} reads aux_hidden_state_layer_ids {ids}; 0 is the embedding, "
            "which sglang_dflash does not capture. Use a drafter that reads layers only."
        )
    return [i - 1 for i in ids]


def _required(config: Mapping[str, Any], key: str, name: str) -> Any:
    if not config.get(key) and config.get(key) != 0:
        raise ValueError(
            f"The drafter {name} is in the speculators format, but its config.json lacks {key}. "
            "Add what it was trained with."
        )
    return config[key]
