"""Quantise a saved target in the formats in which released ones are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dflash.released_pairs import PAIRS

# a subfolder of the target: the same weights after rounding, for transformers
UNQUANTISED = "unquantised"
WEIGHTS = "model.safetensors"
# columns of the eight values in a word of AWQ, from its lowest bits up
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, Tensor]


def published_config(target: str) -> Mapping[str, Any]:
    """Return the quantization_config of a released target."""
    [found] = [form.config for pair in PAIRS for form in pair.forms if form.target == target]
    return found["quantization_config"]


INT4 = published_config("google/gemma-4-31B-it-qat-w4a16-ct")
AWQ = published_config("Qwen/Qwen3-8B-AWQ")


def pack_int4(weight: Tensor, group_size: int) -> tuple[Tensors, Tensor]:
    """Return compressed-tensors' parameters of a weight [N, K], symmetric, and what they stand
    for."""
    groups = weight.unflatten(1, (-1, group_size))
    scales = groups.abs().amax(-1) / 7.5
    values = (groups / scales[..., None]).round().clamp(-8, 7)
    packed = pack_to_int32(values.flatten(1).to(torch.int8), 4)
    found = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return found, (values * scales[..., None]).flatten(1)


def pack_awq(weight: Tensor, group_size: int) -> tuple[Tensors, Tensor]:
    """Return AWQ's parameters of a weight [N, K], with zero points, and what they stand for."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    values = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    found = {
        "qweight": awq_words(values.flatten(1).t()),
        "qzeros": awq_words(zeros.t()),
        "scales": scales.t().contiguous(),
    }
    return found, ((values - zeros[..., None]) * scales[..., None]).flatten(1)


def awq_words(values: Tensor) -> Tensor:
    """Pack eight columns into one int32."""
    eights = values.to(torch.int64).unflatten(-1, (-1, 8))
    words = sum(eights[..., column] << 4 * place for place, column in enumerate(AWQ_ORDER))
    return words.to(torch.int32)  # type: ignore[union-attr]


FORMATS: dict[str, tuple[Mapping[str, Any], Callable[..., tuple[Tensors, Tensor]]]] = {
    "int4": (INT4, pack_int4),
    "awq": (AWQ, pack_awq),
}


def quantise(folder: Path, name: str) -> None:
    """Quantise a saved target's linear layers in place, and keep the rounded weights beside."""
    config, pack = FORMATS[name]
    weights = load_file(folder / WEIGHTS)
    rounded, packed = dict(weights), dict(weights)
    for module in _linear_layers(weights):
        weight = packed.pop(f"{module}.weight")
        parts, rounded[f"{module}.weight"] = pack(weight, _group_size(config))
        packed |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    (folder / UNQUANTISED).mkdir()
    shutil.copy(folder / "config.json", folder / UNQUANTISED)
    metadata = {"format": "pt"}
    save_file(rounded, folder / UNQUANTISED / WEIGHTS, metadata)
    save_file(packed, folder / WEIGHTS, metadata)
    path = folder / "config.json"
    whole = json.loads(path.read_text()) | {"quantization_config": config}
    path.write_text(json.dumps(whole))


def _linear_layers(weights: Tensors) -> Iterator[str]:
    for name in weights:
        module = name.removesuffix(".weight")
        if ".layers." in name and module.endswith("_proj"):
            yield module


def _group_size(config: Mapping[str, Any]) -> int:
    if "group_size" in config:
        return config["group_size"]
    return config["config_groups"]["group_0"]["weights"]["group_size"]
