"""What a pair needs of each card: weights, KV per token, and the tokens that fit.

Tensor parallelism gives each rank a shard of most weights and of the KV heads. What it does not
divide is counted in full: norms, routers, the drafter's projection of features, towers for images
and sound (SGLang divides some of them), and KV heads of which there are fewer than ranks. A
drafter that the ranks cannot share is counted in full as well.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from sglang_dflash import config as cfg
from sglang_dflash.commands.card_names import BY_SIZE, CARDS
from sglang_dflash.commands.quantised_weights import quantised
from sglang_dflash.fp8_drafter import is_quantised
from sglang_dflash.reference import Drafter, DrafterConfig
from sglang_dflash.safetensors_header import read_safetensors_header
from sglang_dflash.speculators_format import HEAD, drafters_own

INDEX = "model.safetensors.index.json"
GIB = 2**30
MIB = 2**20
BYTES = 2  # per bf16 value
STATE_BYTES = 4  # per value of a recurrent state
LINEAR = "linear_attention"
# with fewer there is no point in serving
FEWEST_TOKENS = 1024
# by the size in a card's name
CARDS_GIB = {size: CARDS[name].gib for size, name in BY_SIZE.items()}
# weights that every rank holds whole, by name
REPLICATED = re.compile(
    r"norm|(^|\.)(fc|gate|router|scale|layer_scalar)(\.|$)|vision|visual|audio|projector"
    r"|(^|\.)(attention_conv|mlp_conv|candidate_selector|q_a_proj|kv_a_proj_with_mqa)\."
)
KEYS_AND_VALUES = re.compile(r"\.(k_proj|v_proj)\.")
# of a value in the KV cache, where it is not the model's own type
KV_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class RankMemory:
    """What a pair needs on each rank, in bytes."""

    ranks: int
    target_weights: int | None  # None: unknown before they are loaded, because quantised
    draft_weights: int
    target_kv: dict[str, int]  # of a token, by type of layer
    draft_kv: int
    # tokens that a sliding-window layer keeps, as a share of those of a full-attention layer
    sliding_share: float
    # of a request in linear-attention layers, which have no KV, and after each row of its block
    state: int = 0
    states_of_block: int = 0

    @classmethod
    def of_pair(
        cls,
        target_config: Any,
        draft_config: Any,
        *,
        drafter: cfg.DrafterSpec,
        paths: tuple[str, str],
        asked: argparse.Namespace,
        draft_backend: str | None = None,
    ) -> RankMemory:
        """Count a pair by its files or, where they are not here, by its configs; the drafter's
        attention runs on `draft_backend`."""
        target, draft = paths
        text, ranks = target_config.get_text_config(), asked.tp_size
        target_weights: int | None = None
        # what SGLang quantises while it loads is unknown before
        if not asked.quantization or getattr(target_config, "quantization_config", None):
            sizes = in_files(target) or described(target, trusting=asked.trust_remote_code)
            target_weights = on_one_rank(sizes, ranks, min(kv_heads(text).values()))
        draft_sizes = drafters_own(
            in_files(draft) or described_draft(draft_config),
            whole_vocabulary=drafter.own_vocab_size is None,
        )
        if asked.speculative_draft_model_quantization == "fp8":
            draft_sizes = {
                name: size // BYTES if is_quantised(drafter, name) else size
                for name, size in draft_sizes.items()
            }
        # every rank has all of it
        own_head = draft_sizes.pop(HEAD, 0)
        found = cls(
            ranks=ranks,
            target_weights=target_weights,
            draft_weights=own_head
            + (on_one_rank(draft_sizes, drafter.shards(ranks), drafter.num_kv_heads) or 0),
            target_kv=kv_bytes_per_token(text, ranks),
            draft_kv=drafter.kv_bytes_per_token(element_size=BYTES, tp_size=ranks),
            sliding_share=asked.swa_full_tokens_ratio,
            state=(state := state_bytes(text, ranks)),
            states_of_block=drafter.block_size * state,
        )
        draft_dtype = asked.speculative_draft_kv_cache_dtype
        return found.with_kv(asked.kv_cache_dtype, draft_backend, draft_dtype)

    def with_kv(
        self, dtype: str | None, draft_backend: str | None, draft_dtype: str | None = None
    ) -> RankMemory:
        """Return the same pair with another type of KV cache than bf16; `draft_dtype`: of the
        drafter's, if it is not to be the target's."""
        size = KV_BYTES.get(dtype or "", BYTES)
        draft_size = size if draft_dtype is None else KV_BYTES.get(draft_dtype, BYTES)
        if draft_backend == "fa4":
            # it cannot read an fp8 cache: the draft KV keeps the model's type
            draft_size = BYTES
        return replace(
            self,
            target_kv={kind: kv * size // BYTES for kind, kv in self.target_kv.items()},
            draft_kv=self.draft_kv * draft_size // BYTES,
        )

    @property
    def weights(self) -> int | None:
        """Bytes of both models' weights."""
        return None if self.target_weights is None else self.target_weights + self.draft_weights

    def tokens(self, card_gib: float, fraction: float) -> int:
        """Return the tokens of KV that fit into a share of a card; 0 if the weights do not."""
        assert self.weights is not None
        left = card_gib * GIB * fraction - self.weights
        # SGLang gives sliding layers their own pool: this share of the full layers' pool in tokens
        sliding = self.sliding_share * self.target_kv.get("sliding_attention", 0)
        per_token = self.target_kv.get("full_attention", 0) + sliding + self.draft_kv
        return max(0, int(left // per_token))

    def lines(self, fraction: float, card_gib: float | None) -> dict[str, Any]:
        """Return the plan as names and values to print; `card_gib`: of the card to plan for."""
        where = "" if self.ranks == 1 else f" on each of {self.ranks} ranks"
        target = self.target_weights
        found: dict[str, Any] = {
            f"target weights{where}": "unknown: quantised" if target is None else _gib(target),
            f"draft weights{where}": _gib(self.draft_weights),
        }
        for kind, size in sorted(self.target_kv.items()):
            found[f"target KV per token{where}, {kind}"] = f"{size} bytes"
        found[f"draft KV per token{where}"] = f"{self.draft_kv} bytes"
        if self.state:
            found[f"states of linear attention per request{where}"] = (
                f"{self.state / MIB:.1f} MiB, and {self.states_of_block / MIB:.1f} for its verify "
                "passes"
            )
        if self.weights is None:
            return found
        if card_gib is not None:
            room = f"{card_gib:.0f} GiB"
            room = room if self.ranks == 1 else f"{self.ranks} x {room}"
            left = max(0.0, card_gib * GIB * fraction - self.weights)
            found["for KV and states" if self.state else "for KV"] = (
                f"{left * self.ranks / GIB:.2f} GiB of {room}"
            )
            if not self.state:
                found["tokens that fit"] = self.tokens(card_gib, fraction)
        if self.state:
            # SGLang divides the rest between states and KV
            return found
        fits = {size: self.tokens(gib, fraction) for size, gib in CARDS_GIB.items()}
        found["tokens that fit by card"] = ", ".join(
            f"{size} GB: {tokens if tokens >= FEWEST_TOKENS else 'too small'}"
            for size, tokens in fits.items()
        )
        return found


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def kv_heads(text: Any) -> dict[str, int]:
    """Return the KV heads by type of layer; Gemma 4's types differ, under its own config names.
    Raise ValueError for a type whose KV is not known."""
    names = {
        "full_attention": ("num_global_key_value_heads", "num_key_value_heads"),
        "sliding_attention": ("swa_num_key_value_heads", "num_key_value_heads"),
    }
    unknown = sorted(set(_kinds(text)) - names.keys())
    if unknown:
        raise ValueError(
            f"the memory plan counts KV of {' and '.join(names)} layers, and not of those of type "
            f"{', '.join(unknown)}"
        )
    return {kind: _first(text, *names[kind]) or text.num_attention_heads for kind in _kinds(text)}


def kv_bytes_per_token(text: Any, ranks: int) -> dict[str, int]:
    """Return the bytes of bf16 KV per token on one rank, for each type of layer."""
    if latent_dim := getattr(text, "kv_lora_rank", None):
        # MLA: a latent for all heads, and the rotated part of the keys, which every rank has
        size = (latent_dim + text.qk_rope_head_dim) * BYTES
        return {kind: size * _kinds(text).count(kind) for kind in _kinds(text)}
    plain_dim = _first(text, "head_dim") or text.hidden_size // text.num_attention_heads
    dims = {
        "full_attention": _first(text, "global_head_dim") or plain_dim,
        "sliding_attention": _first(text, "swa_head_dim") or plain_dim,
    }
    heads = kv_heads(text)
    found: dict[str, int] = {}
    for kind in _kinds(text):
        own = max(1, heads[kind] // ranks)
        found[kind] = found.get(kind, 0) + 2 * own * dims[kind] * BYTES
    return found


def state_bytes(text: Any, ranks: int) -> int:
    """Return the bytes of a request's states in linear-attention layers on one rank: fp32, and bf16
    inputs of the convolutions."""
    layers = _all_kinds(text).count(LINEAR)
    if not layers:
        return 0
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    convolution = (2 * keys + values) * (text.linear_conv_kernel_dim - 1) * BYTES
    return layers * (values * text.linear_key_head_dim * STATE_BYTES + convolution) // ranks


def _kinds(text: Any) -> list[str]:
    """Return the types of the layers that have KV."""
    return [kind for kind in _all_kinds(text) if kind != LINEAR]


def _all_kinds(text: Any) -> list[str]:
    # SGLang's configs of targets with linear attention have their own name for layer types
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    kinds = kinds or ["full_attention"] * text.num_hidden_layers
    return ["full_attention" if kind == "attention" else kind for kind in kinds]


def _first(text: Any, *names: str) -> int:
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if value), 0)


def on_one_rank(sizes: dict[str, int] | None, ranks: int, heads: int) -> int | None:
    """Return the bytes of weights, given by name, that one rank holds; `heads`: KV heads."""
    if sizes is None:
        return None
    return round(sum(size * _share(name, ranks, heads) for name, size in sizes.items()))


def _share(name: str, ranks: int, heads: int) -> float:
    if REPLICATED.search(name):
        return 1.0
    return max(1 / ranks, 1 / heads) if KEYS_AND_VALUES.search(name) else 1 / ranks


def in_files(path: str) -> dict[str, int] | None:
    """Return the bytes of each tensor of a local checkpoint; None if there is none."""
    return dict(_tensors(Path(path))) or None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that a server loads: those of the index, if there is one, and
    not what lies beside them. Raise ValueError if the index names a file that is missing, unless
    all of them are: then none was downloaded."""
    found = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if not index.is_file():
        return found
    try:
        named = sorted(
            {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is not an index of tensors. Download it again.") from None
    missing = [path.name for path in named if not path.is_file()]
    if len(missing) == len(named):
        return []
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}, which its {INDEX} names. Download it again."
        )
    return named


def _tensors(folder: Path) -> Iterator[tuple[str, int]]:
    for file in weight_files(folder):
        for name, entry in read_safetensors_header(file).items():
            begin, end = entry["data_offsets"]
            yield name, end - begin


def described(path: str, *, trusting: bool) -> dict[str, int] | None:
    """Return the bytes of each tensor that a target's config implies, bf16 or quantised; None if
    transformers cannot build the model, or the way it is quantised is not understood."""
    # not through SGLang, which renames fields of some configs and so changes the model
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trusting)
    model_class = getattr(transformers, config.architectures[0], None)
    if model_class is None:
        return None
    scheme = getattr(config, "quantization_config", None)
    with torch.device("meta"):
        model = model_class(config)
    sizes = _parameters(model)
    return sizes if scheme is None else quantised(sizes, model, scheme)


def described_draft(config: Any) -> dict[str, int]:
    with torch.device("meta"):
        return _parameters(Drafter(DrafterConfig.from_json(config.to_dict())))


def _parameters(model: torch.nn.Module) -> dict[str, int]:
    return {name: BYTES * parameter.numel() for name, parameter in model.named_parameters()}
