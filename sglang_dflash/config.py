"""A server's configuration: the drafter's config and the user's options, validated and resolved.

Every error says what was requested, what was found and what to do, and is raised before weights
load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash import dflash2_format, drafter_config, mask_embedding
from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.drafter_config import FULL, PLAIN, SLIDING, SUPPORTED_LAYER_TYPES
from sglang_dflash.environment import DFLASH_SPEC_V2, SPEC_V2, Environment
from sglang_dflash.safetensors_header import read_safetensors_header

if TYPE_CHECKING:
    from torch import Tensor

NON_CAUSAL_SLIDING = "non-causal sliding_attention"


@dataclass(frozen=True)
class Overlap:
    """How host work overlaps GPU work, and what decided it."""

    schedule: bool  # the host prepares a step while the previous one runs
    plan_stream: bool  # verify is planned on a side stream while the drafter runs
    reason: str  # why `schedule` is on or off

    @classmethod
    def resolve(cls, environment: Environment, *, disabled: bool) -> Overlap:
        """Decide from the three switches; --disable-overlap-schedule always wins."""
        switches = {SPEC_V2: environment.spec_v2, DFLASH_SPEC_V2: environment.dflash_spec_v2}
        plan_stream = environment.plan_stream
        off = [f"{name}=0" for name, on in switches.items() if not on]
        if disabled:
            return cls(False, plan_stream, "--disable-overlap-schedule")
        if off:
            return cls(False, plan_stream, " and ".join(off))
        return cls(True, plan_stream, "on unless switched off")


@dataclass(frozen=True)
class DrafterSpec:
    """The properties of a drafter that a server depends on."""

    name: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None
    # of a head of its own for a part of the vocabulary; None if it uses the target's
    own_vocab_size: int | None = None
    causal_windows: bool = True  # whether sliding layers are causal within the block
    # row k of a block predicts the token after it, instead of its own
    samples_from_anchor: bool = False
    scales_embedding: bool = True  # as the target scales it, if it does
    has_bias: bool = False  # in the projections of attention
    dflash2: DFlash2 | None = None  # None for a plain drafter

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str) -> DrafterSpec:
        """Read a drafter's config.json, of either format. Raise ValueError naming a missing or
        unsupported key."""
        return cls.from_loaded(drafter_config.read(config, name=name), name=name)

    @classmethod
    def from_loaded(cls, config: Mapping[str, Any], *, name: str) -> DrafterSpec:
        """Read a config that was checked before and may contain keys added by SGLang."""
        dflash = config.get("dflash_config") or {}
        num_layers = _require(config, "num_hidden_layers", name)
        num_heads = _require(config, "num_attention_heads", name)
        hidden_size = _require(config, "hidden_size", name)
        mask_token_id = dflash.get("mask_token_id")
        if mask_token_id is None:
            raise ValueError(
                f"The drafter {name} names no mask token: its config.json lacks "
                "dflash_config.mask_token_id. Add the id of the token it was trained with."
            )
        layer_ids = dflash.get("target_layer_ids")
        if not layer_ids:
            raise ValueError(
                f"The drafter {name} does not name the target layers it reads: its config.json "
                "lacks dflash_config.target_layer_ids. Add the layer ids it was trained with."
            )
        if not config.get("architectures"):
            raise ValueError(
                f"SGLang loads the drafter {name} by its architecture, but its config.json names "
                f'none. Add "architectures": {json.dumps([PLAIN])} to it.'
            )
        layer_types = tuple(config.get("layer_types") or (FULL,) * num_layers)
        block_size = dflash.get("block_size") or config.get("block_size") or 16
        spec = cls(
            name=name,
            hidden_size=hidden_size,
            intermediate_size=_require(config, "intermediate_size", name),
            vocab_size=_require(config, "vocab_size", name),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(layer_ids),
            layer_types=layer_types,
            sliding_window=config.get("sliding_window"),
            own_vocab_size=drafter_config.own_vocab_size(config),
            causal_windows=drafter_config.has_causal_windows(config),
            samples_from_anchor=drafter_config.samples_from_anchor(config),
            scales_embedding=drafter_config.scales_embedding(config),
            has_bias=bool(config.get("attention_bias")),
            dflash2=dflash2_format.read(config, name=name, block_size=block_size),
        )
        spec._check_layers()
        return spec

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"The drafter {self.name} has {self.num_layers} layers but {len(self.layer_types)} "
                "layer_types. Its config.json must name one type per layer."
            )
        unknown = sorted(set(self.layer_types) - set(SUPPORTED_LAYER_TYPES))
        if unknown:
            raise ValueError(
                f"The drafter {self.name} has layers of type {', '.join(unknown)}; sglang_dflash "
                f"runs {' and '.join(SUPPORTED_LAYER_TYPES)}."
            )
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"The drafter {self.name} has sliding_attention layers but no sliding_window. "
                "Add sliding_window and use_sliding_window: true to its config.json."
            )
        # backends differ in what such a layer sees of a block that is longer than its window
        window = self.sliding_window or 0
        if NON_CAUSAL_SLIDING in self.attention_kinds() and window < self.block_size:
            raise ValueError(
                f"The drafter {self.name} has non-causal windows of {window} tokens, "
                f"shorter than its block of {self.block_size}, which sglang_dflash does not serve."
            )
        if self.own_vocab_size is not None and not 0 < self.own_vocab_size < self.vocab_size:
            raise ValueError(
                f"The drafter {self.name} has a draft_vocab_size of {self.own_vocab_size}, but a "
                f"vocabulary of {self.vocab_size}. Correct its config.json."
            )

    def attention_kinds(self) -> set[str]:
        """Return the kinds of attention that a draft backend has to run."""
        sliding = SLIDING if self.causal_windows else NON_CAUSAL_SLIDING
        return {sliding if kind == SLIDING else kind for kind in self.layer_types}

    def window_left(self, layer: int) -> int:
        """Return how many keys to its left a query of this layer sees, -1 for all."""
        if self.layer_types[layer] == FULL:
            return -1
        assert self.sliding_window is not None
        return self.sliding_window - 1

    def is_causal(self, layer: int) -> bool:
        """Return whether this layer is causal within the block."""
        return self.causal_windows and self.layer_types[layer] == SLIDING

    def mask_embedding(self, folder: Path) -> Tensor | None:
        """Return the learned embedding of the mask token, None if the target's is used."""
        return mask_embedding.read(
            folder,
            name=self.name,
            mask_token_id=self.mask_token_id,
            hidden_size=self.hidden_size,
        )

    def shards(self, tp_size: int) -> int:
        """Return over how many of the ranks the drafter is divided: over all of them, or over none
        (1), because its heads or its MLP are not divisible. Every rank then holds all of it."""
        can_share = divides(tp_size, self.num_heads, [self.num_kv_heads])
        return tp_size if can_share and self.intermediate_size % tp_size == 0 else 1

    def kv_bytes_per_token(self, *, element_size: int, tp_size: int) -> int:
        """Return the bytes of draft KV per token on one rank."""
        heads = max(1, self.num_kv_heads // self.shards(tp_size))
        return self.num_layers * 2 * heads * self.head_dim * element_size


def divides(ranks: int, query_heads: int, kv_heads: Iterable[int]) -> bool:
    """Return whether every rank gets the same number of heads. With fewer KV heads than ranks,
    several ranks hold the same one."""
    return query_heads % ranks == 0 and all(
        each % ranks == 0 or ranks % each == 0 for each in kv_heads
    )


@dataclass(frozen=True)
class TargetSpec:
    """The properties of a target that a drafter must match."""

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_len: int
    delivers_last_layer: bool


@dataclass(frozen=True)
class DFlashConfig:
    """The resolved settings of one server."""

    drafter: DrafterSpec
    block_size: int
    context_len: int
    device: str
    draft_backend: str
    overlap: Overlap
    # how the drafter's MLPs and output projections are quantised while they are loaded, if at all
    draft_quantisation: str | None = None
    # verify width of every step; None to choose it step by step
    width: int | None = None
    # whether the requests of a step may verify different numbers of rows
    shares_rows: bool = False
    # for benchmarks: commit this many tokens per step, whatever the target says
    simulated_accept_length: float | None = None
    # for benchmarks: commit as many as drawn from the profile that a request's id names
    draws_acceptance: bool = False
    # for debugging: whether the ranks compare every step
    compares_ranks: bool = False

    @property
    def has_full_blocks(self) -> bool:
        """Whether every step verifies all drafts."""
        return self.width == self.block_size

    @property
    def mask_token_id(self) -> int:
        return self.drafter.mask_token_id

    def summary(self) -> dict[str, object]:
        """Return the settings as plain values, for the log and /server_info."""
        return {
            "drafter": self.drafter.name,
            "block_size": self.block_size,
            "trained_block_size": self.drafter.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.drafter.target_layer_ids),
            "layer_types": list(self.drafter.layer_types),
            "context_len": self.context_len,
            "device": self.device,
            "draft_attention_backend": self.draft_backend,
            "draft_weights": self.draft_quantisation or "as released",
            "overlap_schedule": self.overlap.schedule,
            "plan_stream": self.overlap.plan_stream,
            "simulated_accept_length": (
                "drawn" if self.draws_acceptance else self.simulated_accept_length
            ),
        }


def resolve_block_size(drafter: DrafterSpec, asked: int | None) -> int:
    """Return the block size to run: the requested one, or the one the drafter was trained with."""
    if asked is None:
        return drafter.block_size
    if asked < 2:
        raise ValueError(
            f"--speculative-num-draft-tokens {asked} leaves nothing to draft: a block is the last "
            f"token and at least one draft. Pass 2 to {drafter.block_size}."
        )
    if asked > drafter.block_size:
        raise ValueError(
            f"--speculative-num-draft-tokens {asked} exceeds the block size {drafter.block_size} "
            f"that the drafter {drafter.name} was trained with. "
            f"Pass {drafter.block_size} or less."
        )
    return asked


def check_pair(drafter: DrafterSpec, target: TargetSpec) -> None:
    """Raise ValueError unless this drafter can read this target's features and share its head."""
    if drafter.hidden_size != target.hidden_size:
        raise ValueError(
            f"The drafter {drafter.name} has hidden size {drafter.hidden_size}, the target "
            f"{target.name} has {target.hidden_size}; they share embedding and head, so the sizes "
            "must be equal. Use the drafter that was trained for this target."
        )
    if drafter.vocab_size != target.vocab_size:
        raise ValueError(
            f"The drafter {drafter.name} has a vocabulary of {drafter.vocab_size}, the target "
            f"{target.name} of {target.vocab_size}. Use the drafter trained for this target."
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise ValueError(
            f"The mask token {drafter.mask_token_id} of the drafter {drafter.name} is outside the "
            f"vocabulary of {target.vocab_size}. Correct dflash_config.mask_token_id."
        )
    last = target.num_layers - (1 if target.delivers_last_layer else 2)
    beyond = [i for i in drafter.target_layer_ids if not 0 <= i <= last]
    if beyond:
        raise ValueError(
            f"The drafter {drafter.name} reads target layers {beyond}, but the target "
            f"{target.name} ({target.num_layers} layers) delivers layers 0 to {last}. "
            "Use the drafter that was trained for this target."
        )
    if list(drafter.target_layer_ids) != sorted(set(drafter.target_layer_ids)):
        raise ValueError(
            f"The drafter {drafter.name} names target layers {list(drafter.target_layer_ids)}; "
            "SGLang delivers each layer once, in order. List them ascending, without repeats."
        )


def check_features(drafter: DrafterSpec, folder: Path, *, target: TargetSpec) -> None:
    """Raise ValueError if the drafter's weights are incomplete or expect other features, or its
    mask embedding is not one.

    Reads only the headers of the safetensors files. A folder without weights passes: dummy weights
    take their shapes from the config.
    """
    drafter.mask_embedding(folder)
    headers = [read_safetensors_header(path) for path in sorted(folder.glob("*.safetensors"))]
    names = ("fc.weight", "model.fc.weight")
    shapes = [header[name]["shape"] for header in headers for name in names if name in header]
    expected = [drafter.hidden_size, len(drafter.target_layer_ids) * target.hidden_size]
    if shapes and shapes[0] != expected:
        raise ValueError(
            f"The drafter {drafter.name} was trained on "
            f"{shapes[0][-1] / target.hidden_size:g} features per token (fc.weight is "
            f"{shapes[0]}), but its config names "
            f"{len(drafter.target_layer_ids)} target layers, which needs {expected}. "
            "Correct dflash_config.target_layer_ids."
        )


def _require(config: Mapping[str, Any], key: str, name: str) -> int:
    if config.get(key) is None:
        raise ValueError(
            f"The drafter {name} is not a DFlash drafter: its config.json lacks {key}."
        )
    return int(config[key])
