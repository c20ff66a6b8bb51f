"""FP8 weights of the drafter: which of its weights get them, and where they can be served.

Its QKV projections stay as released, because they also project the target's features, and so do
output projections with a bias, whose order SGLang 0.5.17 confuses on cards without FP8 arithmetic.
Cards of compute capability 8.9 and later multiply in FP8. Those of 8.0 to 8.8 run Marlin, which
reads FP8 weights in fixed tiles.
"""

from __future__ import annotations

import re

from sglang_dflash.config import DrafterSpec

OPTION = "--speculative-draft-model-quantization fp8"
# compute capabilities
HAS_FP8, HAS_MARLIN = (8, 9), (8, 0)
# of a weight: input and output sizes that any number of rows finds a tile for are multiples of
MARLIN_TILES = ((64, 128), (128, 64))
MLP = ("gate_proj", "up_proj", "down_proj")


def quantises_output(drafter: DrafterSpec) -> bool:
    """Return whether the output projections of attention get FP8 weights."""
    return not drafter.has_bias


def is_quantised(drafter: DrafterSpec, name: str) -> bool:
    """Return whether a tensor of the checkpoint gets FP8 weights."""
    parts = (*MLP, "o_proj") if quantises_output(drafter) else MLP
    return re.search(rf"\.({'|'.join(parts)})\.weight$", name) is not None


def describe(drafter: DrafterSpec) -> str:
    """Return which weights are FP8, for the log."""
    parts = "MLPs and output projections have" if quantises_output(drafter) else "MLPs have"
    return (
        f"the drafter's {parts} FP8 weights; its QKV projections stay as released, because they "
        "also project the target's features."
    )


def check(
    drafter: DrafterSpec, *, capability: tuple[int, int], is_fp32: bool, tp_size: int
) -> None:
    """Raise ValueError unless FP8 weights of the drafter can be served on a card."""
    if is_fp32:
        raise ValueError(f"{OPTION} needs a target in bf16 or fp16, and this one is fp32. Drop it.")
    if capability < HAS_MARLIN:
        raise ValueError(
            f"{OPTION} needs compute capability 8.0 or later, but this card has "
            f"{'.'.join(map(str, capability))}. Drop it."
        )
    if capability >= HAS_FP8:
        return
    for name, (inputs, outputs) in _products(drafter, tp_size).items():
        if not any(inputs % k == 0 and outputs % n == 0 for k, n in MARLIN_TILES):
            raise ValueError(
                f"{OPTION}: Marlin, which multiplies FP8 weights on cards of compute capability "
                f"{'.'.join(map(str, capability))}, has no tile for the drafter's {name} of "
                f"{inputs} x {outputs} on each rank. Drop it."
            )


def _products(drafter: DrafterSpec, tp_size: int) -> dict[str, tuple[int, int]]:
    """Return input and output sizes of the quantised projections on one rank."""
    shards = drafter.shards(tp_size)
    hidden, inner = drafter.hidden_size, drafter.intermediate_size // shards
    found = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
    if quantises_output(drafter):
        found["o_proj"] = (drafter.num_heads // shards * drafter.head_dim, hidden)
    return found
