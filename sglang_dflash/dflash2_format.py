"""Read what the config of a DFlash2 drafter says beyond that of a plain one.

A DFlash2 drafter names the architecture `DFlash2DraftModel`. It is a plain drafter, usually with
sliding windows and `is_causal: false`, and two additions. H is the hidden size, V the vocabulary.

A convolution around each sublayer, attention and MLP, lets a row of a block read the rows before
it. `dflash_config` gives its number of taps, `conv_kernel_size` T, and `conv_group_size`, the
channels that share a dynamic coefficient. With G = H / conv_group_size groups, each layer has

    attention_conv.base_kernel               [2, T, H]      side, tap, channel
    attention_conv.kernel_projection.weight  [2 * T * G, H]

and the same of `mlp_conv`. For row i of the block and channel c of group g,

    out[i, c] = sum over t <= i of (base[t, c] + dynamic[i, t, g]) * x[i - t, c]

Side 0 of the kernels is applied to a sublayer's normed input, side 1 to its output before the
residual addition. The dynamic coefficients of both come from one projection of the normed input.
No row reads across the start of its block, and the context passes through no convolution.

A selector chooses a path through the likeliest tokens of each position. `selector_top_k` says how
many, `selector_rank` R the size of its codebooks:

    candidate_selector.hidden_projection.weight  [R, H]
    candidate_selector.predecessor_codebook      [V, R]
    candidate_selector.successor_codebook        [V, R]

After token p, candidate c of a position whose row ends in hidden state h has the score

    unary[c] + sum over r of predecessor[p, r] * (hidden_projection h)[r] * successor[c, r]

The path starts at the anchor. Greedily, the best candidate of each position follows the chosen one
of the position before; to sample, each is drawn from the softmax of the scores over the candidates.
unary is the target's head on h, times `output_multiplier`, then soft-capped by
`final_logit_softcapping`, where `dflash_config` has these keys. Without them it is the plain logit,
also if the target caps its own.

From the configuration and the safetensors header in z-lab/dflash (tests/fixtures), and the networks
in vLLM (qwen3_dflash2.py), SGLang 0.5.23 (models/dflash.py) and speculators (models/dflash2), which
agree. `input_embedding_scale` is refused unless 1: vLLM multiplies embeddings by it, SGLang ignores
it, and no released config uses it, so its meaning for targets that scale embeddings is open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "DFlash2DraftModel"
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# of the logits; optional
TRANSFORMS = ("output_multiplier", "final_logit_softcapping")


@dataclass(frozen=True, kw_only=True)
class DFlash2:
    """The settings of the convolution and of the selector."""

    conv_taps: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    output_multiplier: float = 1.0
    logit_cap: float = 0.0  # of the drafter's own logits; 0 for none

    def to_json(self) -> dict[str, Any]:
        """Return the keys of `dflash_config`, without those that only repeat a default."""
        sizes = (self.conv_taps, self.conv_group_size, self.selector_rank, self.selector_top_k)
        found: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
        if self.output_multiplier != 1.0:
            found["output_multiplier"] = self.output_multiplier
        if self.logit_cap:
            found["final_logit_softcapping"] = self.logit_cap
        return found


def describes(config: Mapping[str, Any]) -> bool:
    """Return whether a config of the released format is a DFlash2 drafter's."""
    return ARCHITECTURE in (config.get("architectures") or ())


def read(config: Mapping[str, Any], *, name: str, block_size: int) -> DFlash2 | None:
    """Return the settings of a DFlash2 drafter, None for a plain one. Raise ValueError for what is
    missing, or cannot be."""
    if not describes(config):
        return None
    dflash = config.get("dflash_config") or {}
    missing = [f"dflash_config.{key}" for key in SIZES if dflash.get(key) is None]
    if missing:
        raise ValueError(
            f"The drafter {name} is a DFlash2 drafter ({ARCHITECTURE}), but its config.json lacks "
            f"{', '.join(missing)}. Add what it was trained with."
        )
    taps, group, rank, top_k = (dflash[key] for key in SIZES)
    multiplier = _number(dflash.get("output_multiplier"), default=1.0)
    cap = _number(dflash.get("final_logit_softcapping"), default=0.0)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    wrong = [
        f"dflash_config.{key} {dflash[key]!r} is not a positive whole number"
        for key in SIZES
        if type(dflash[key]) is not int or dflash[key] < 1
    ]
    if not wrong:
        limits = {
            f"conv_kernel_size {taps} exceeds the block of {block_size}": taps > block_size,
            f"conv_group_size {group} does not divide hidden_size {hidden}": hidden % group != 0,
            f"selector_top_k {top_k} exceeds vocab_size {vocab}": top_k > vocab,
        }
        wrong = [what for what, is_so in limits.items() if is_so]
    if not 0 < multiplier < math.inf:
        wrong.append(f"output_multiplier {dflash['output_multiplier']!r} is not positive")
    if not 0 <= cap < math.inf:
        wrong.append(
            f"final_logit_softcapping {dflash['final_logit_softcapping']!r} is not positive"
        )
    if wrong:
        raise ValueError(
            f"The config.json of the DFlash2 drafter {name} cannot be right: {', '.join(wrong)}. "
            "Correct it."
        )
    return DFlash2(
        conv_taps=taps,
        conv_group_size=group,
        selector_rank=rank,
        selector_top_k=top_k,
        output_multiplier=multiplier,
        logit_cap=cap,
    )


def _number(value: Any, *, default: float) -> float:
    """Return a number of a config, NaN for anything else."""
    if value is None:
        return default
    return float(value) if isinstance(value, int | float) else math.nan
