"""The size of a quantised target's weights, from its config.json.

What is quantised are the matrices of linear layers and of experts, except those that the config
leaves out; embeddings, norms and the head stay as they are. A matrix then takes its bits, and a
scale for every group of values, with a zero point if the groups are not symmetric.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

BF16_BITS = 16
# of an FP8 matrix with blocks of its own scale; scales of a row or of the whole are next to nothing
NO_GROUPS = 0
HEAD = re.compile(r"(^|\.)lm_head(\.|$)")
EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class Scheme:
    """How values are stored."""

    bits: int
    group_size: int  # values that share a scale; NO_GROUPS: more than worth counting
    scale_bits: int = BF16_BITS
    zero_bits: int = 0
    experts_only: bool = False

    def share(self) -> float:
        """Return the size of a matrix, as a fraction of its size in bf16."""
        groups = (self.scale_bits + self.zero_bits) / self.group_size if self.group_size else 0.0
        return (self.bits + groups) / BF16_BITS


MXFP4 = Scheme(4, 32, scale_bits=8, experts_only=True)
NVFP4 = Scheme(4, 16, scale_bits=8)
FP8 = Scheme(8, NO_GROUPS)


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a `quantization_config`; None if it is not one that is understood."""
    method = config.get("quant_method")
    if method == "mxfp4":
        return MXFP4
    if method == "fp8":
        return FP8
    if method in ("awq", "gptq"):
        bits = config["bits"]
        has_zeros = config.get("zero_point", True) if method == "awq" else not config.get("sym")
        return Scheme(bits, max(0, config["group_size"]), zero_bits=bits if has_zeros else 0)
    if method == "modelopt":
        return NVFP4 if config.get("quant_algo") == "NVFP4" else None
    return _compressed_tensors(config) if method == "compressed-tensors" else None


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme | None:
    groups = list(config.get("config_groups", {}).values())
    if len(groups) != 1:
        return None
    weights = groups[0]["weights"]
    bits = weights["num_bits"]
    if weights["type"] == "float":
        return {4: NVFP4, 8: FP8}.get(bits)
    zeros = 0 if weights.get("symmetric", True) else bits
    return Scheme(bits, weights.get("group_size") or NO_GROUPS, zero_bits=zeros)


def quantised(
    sizes: Mapping[str, int], model: torch.nn.Module, config: Mapping[str, Any]
) -> dict[str, int] | None:
    """Return the bytes of each parameter of a model once it is quantised so; `sizes` are those in
    bf16. None if the scheme is not understood."""
    scheme = read_scheme(config)
    if scheme is None:
        return None
    is_left_out = _left_out(config)
    found = dict(sizes)
    for name in _matrices(model, experts_only=scheme.experts_only):
        if name in found and not HEAD.search(name) and not is_left_out(name):
            found[name] = round(found[name] * scheme.share())
    return found


def _matrices(model: torch.nn.Module, *, experts_only: bool) -> Iterable[str]:
    for name, _ in model.named_parameters():
        if EXPERTS.search(name):
            yield name
    if experts_only:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield f"{name}.weight"


def _left_out(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return whether a config leaves a parameter unquantised: it has names, parts of names,
    patterns of a shell, or regular expressions after `re:`."""
    listed = [
        entry
        for key in ("ignore", "exclude_modules", "modules_to_not_convert")
        for entry in config.get(key) or ()
    ]
    patterns = [
        re.compile(entry[3:] if entry.startswith("re:") else fnmatch.translate(entry))
        for entry in listed
        if entry.startswith("re:") or "*" in entry
    ]
    parts = {entry for entry in listed if not entry.startswith("re:") and "*" not in entry}

    def is_left_out(name: str) -> bool:
        module = name.removesuffix(".weight")
        return any(pattern.match(module) for pattern in patterns) or any(
            f".{part}." in f".{module}." for part in parts
        )

    return is_left_out
