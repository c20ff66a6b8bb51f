"""`python -m sglang_dflash convert SRC DST`: rewrite a drafter in the other of the two formats.

The released format becomes the one of vLLM's speculators library, and the other way around. The
tensors of the network have the same names in both, and are copied unchanged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from sglang_dflash import drafter_config, mask_embedding, speculators_format
from sglang_dflash.checkpoint import check_checkpoint
from sglang_dflash.commands.config_file import UNREADABLE, read_config_file
from sglang_dflash.config import DrafterSpec
from sglang_dflash.reference import Drafter, DrafterConfig
from sglang_dflash.speculators_format import HEAD, OFFSETS

# in the order in which a checkpoint's head is looked for; the last one is a tied embedding
HEAD_NAMES = ("lm_head.weight", "embed_tokens.weight")


def run_convert(options: argparse.Namespace) -> int:
    """Write DST and say what it is; return 1 with the reason if it cannot be."""
    try:
        done = convert(Path(options.source), Path(options.destination), target=options.model_path)
    except ValueError as error:
        print(error)
        return 1
    print(done)
    return 0


def convert(source: Path, destination: Path, *, target: str | None) -> str:
    """Write a drafter in the other format into a new folder; return what was done. Raise ValueError
    for what the other format cannot represent."""
    raw = read_config_file(source, wanted="a drafter's folder as SRC")
    if destination.exists():
        raise ValueError(f"{destination} exists already. Pass a folder that does not, as DST.")
    if (source / mask_embedding.FILE).exists():
        raise ValueError(
            f"The drafter {source} has a learned {mask_embedding.FILE}, which the speculators "
            "format cannot represent. sglang_dflash serves it as it is."
        )
    config = drafter_config.read(raw, name=str(source))
    spec = DrafterSpec.from_loaded(config, name=str(source))
    check_checkpoint(str(source), role="drafter")
    weights = _read_weights(source)
    if speculators_format.describes(raw):
        weights = speculators_format.drafters_own(
            weights, whole_vocabulary=spec.own_vocab_size is None
        )
    _check_tensors(weights, spec)
    if speculators_format.describes(raw):
        kind = "released format"
        written = _to_released(raw, config, spec, target)
        if spec.own_vocab_size is not None:
            _drop_copied_head(weights, spec, target)
    else:
        kind = "speculators format"
        written = _to_speculators(config, spec, target)
        if spec.own_vocab_size is not None:
            weights[speculators_format.IS_DRAFTED] = _is_drafted(weights[OFFSETS], spec)
    _make_folder(destination)
    text = json.dumps(written, indent=2, sort_keys=True)
    (destination / "config.json").write_text(text + "\n")
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
    return f"{destination} is {source} in the {kind}, with {len(weights)} tensors."


def _make_folder(destination: Path) -> None:
    try:
        destination.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"{destination} cannot be made: {error.strerror}. Pass a new folder as DST, where you "
            "may write."
        ) from None


def _check_tensors(weights: Mapping[str, Tensor], spec: DrafterSpec) -> None:
    """Raise ValueError unless these are the tensors that the drafter's config demands: a server
    would refuse any others."""
    demanded = _demanded_shapes(spec)
    found = {name: list(tensor.shape) for name, tensor in weights.items()}
    wrong = [
        f"{name} has shape {found[name]} instead of {demanded[name]}"
        for name in sorted(demanded.keys() & found.keys())
        if found[name] != demanded[name]
    ]
    told = {
        "missing": sorted(demanded.keys() - found.keys()),
        "unknown": sorted(found.keys() - demanded.keys()),
        "of another shape": wrong,
    }
    if any(told.values()):
        counted = [f"{len(names)} {what} ({_some(names)})" for what, names in told.items() if names]
        raise ValueError(
            f"The tensors of the drafter {spec.name} are not those that its config.json demands: "
            f"{', '.join(counted)}. Download all of its files again, or use another drafter."
        )


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _demanded_shapes(spec: DrafterSpec) -> dict[str, list[int]]:
    config = DrafterConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        target_layer_ids=spec.target_layer_ids,
        layer_types=spec.layer_types,
        sliding_window=spec.sliding_window,
        attention_bias=spec.has_bias,
        draft_vocab_size=spec.own_vocab_size,
        dflash2=spec.dflash2,
    )
    with torch.device("meta"):
        return {name: list(each.shape) for name, each in Drafter(config).state_dict().items()}


def _to_released(
    raw: Mapping[str, Any], config: Mapping[str, Any], spec: DrafterSpec, target: str | None
) -> dict[str, Any]:
    if spec.samples_from_anchor:
        raise ValueError(
            f"The drafter {spec.name} samples from the anchor (sample_from_anchor: true), which "
            "the released format cannot represent. sglang_dflash serves it as it is."
        )
    target_config = None if target is None else _target_config(target)
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    architectures = verifier.get("architectures") or []
    _refuse_other_scaling(spec, target_config, architectures)
    found = dict(config)
    found["dflash_config"] = {
        key: config["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")
    }
    if spec.dflash2 is not None:
        found["dflash_config"] |= spec.dflash2.to_json()
    # a part of the vocabulary is refused, or its head is the target's
    found.pop("draft_vocab_size", None)
    if not spec.causal_windows:
        found["is_causal"] = False
    if target_config is not None:
        found["num_target_layers"] = target_config.num_hidden_layers
    return found


def _to_speculators(
    config: Mapping[str, Any], spec: DrafterSpec, target: str | None
) -> dict[str, Any]:
    if target is None:
        raise ValueError(
            "The speculators format names the target that its reader takes the embedding and the "
            "head from. Pass --model-path with the drafter's target: a folder or a model name."
        )
    if spec.dflash2 is not None and (spec.dflash2.logit_cap or spec.dflash2.output_multiplier != 1):
        raise ValueError(
            f"The drafter {spec.name} multiplies or caps its logits (output_multiplier, "
            "final_logit_softcapping), which the speculators format cannot represent. "
            "sglang_dflash serves it as it is."
        )
    target_config = _target_config(target)
    architectures = AutoConfig.from_pretrained(target).architectures or []
    _refuse_other_scaling(spec, target_config, architectures)
    return speculators_format.written(
        config,
        target=target,
        target_architectures=architectures,
        target_layer_ids=spec.target_layer_ids,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        sample_from_anchor=spec.samples_from_anchor,
        non_causal_windows=not spec.causal_windows,
        dflash2=spec.dflash2,
    )


def _refuse_other_scaling(
    spec: DrafterSpec, target: PretrainedConfig | None, architectures: list[str]
) -> None:
    """Raise ValueError for a target whose embedding is scaled in one format only."""
    kinds = [*architectures, *([] if target is None else [target.model_type])]
    scaled = [kind for kind in kinds if kind.lower().startswith("gemma")]
    if scaled:
        raise ValueError(
            f"The drafter {spec.name} is for a target that scales its embedding ({scaled[0]}). The "
            "released format scales the block's tokens with it, the speculators format does not, "
            "so the converted drafter would read other embeddings. sglang_dflash serves both as "
            "they are."
        )


def _drop_copied_head(weights: dict[str, Tensor], spec: DrafterSpec, target: str | None) -> None:
    """Remove a head of its own that is a copy of rows of the target's; raise ValueError for any
    other, which the released format cannot represent."""
    head, offsets = weights.pop(HEAD), weights.pop(OFFSETS)
    advice = (
        f"The drafter {spec.name} has a head of its own for {spec.own_vocab_size} of "
        f"{spec.vocab_size} tokens, which the released format cannot represent"
    )
    if target is None:
        raise ValueError(
            f"{advice} unless it is a copy of rows of the target's. Pass --model-path with the "
            "target's folder to compare them. sglang_dflash serves this drafter as it is."
        )
    tokens = offsets + torch.arange(len(offsets))
    rows = _target_head(Path(target))[tokens].to(head.dtype)
    if not torch.equal(rows, head):
        raise ValueError(
            f"{advice}: its rows differ from those of {target}. sglang_dflash serves it as it is."
        )


def _target_head(folder: Path) -> Tensor:
    for wanted in HEAD_NAMES:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if name == wanted or name.endswith(f".{wanted}"):
                        return tensors.get_tensor(name)
    raise ValueError(
        f"{folder} has no safetensors with an LM head or an embedding. Pass --model-path with a "
        "local folder of the drafter's target."
    )


def _is_drafted(offsets: Tensor, spec: DrafterSpec) -> Tensor:
    tokens = offsets + torch.arange(len(offsets))
    return torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)


def _read_weights(source: Path) -> dict[str, Tensor]:
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{source} has no safetensors. Download the drafter's weights, too.")
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(file)
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def _target_config(target: str) -> PretrainedConfig:
    if Path(target).is_dir():
        read_config_file(Path(target), wanted="the drafter's target as --model-path")
    try:
        return AutoConfig.from_pretrained(target).get_text_config()
    except UNREADABLE as error:
        raise ValueError(
            f"--model-path {target} has no model that transformers can read: "
            f"{str(error).splitlines()[0]} Pass the drafter's target."
        ) from None
