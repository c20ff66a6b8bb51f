"""The oracle's view of a drafter's config.json. Shared with the rest of the package: the list of
supported keys, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dflash import dflash2_format, drafter_config, speculators_format
from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.drafter_config import FULL, SLIDING

YARN = (
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The checked content of a drafter's config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # YaRN's settings; None: unscaled
    attention_bias: bool = False  # of all four projections
    max_position_embeddings: int = 2048
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    num_target_layers: int | None = None  # None if the config does not say
    draft_vocab_size: int | None = None  # of a head of its own; None if it uses the target's
    causal_windows: bool = True  # whether sliding layers are causal within the block
    # row k of a block predicts the token after it, instead of its own
    sample_from_anchor: bool = False
    scale_embedding: bool = True  # as the target scales it, if it does
    dflash2: DFlash2 | None = None  # None for a plain drafter

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers but num_hidden_layers is "
                f"{self.num_hidden_layers}. Give one type for each layer."
            )
        if unknown := sorted(set(self.layer_types) - {FULL, SLIDING}):
            raise ValueError(f"layer_types holds {unknown}. Use only {FULL!r} and {SLIDING!r}.")
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"layer_types asks for {SLIDING!r} but sliding_window is {self.sliding_window}. "
                "Set sliding_window to the number of tokens a query may see, itself included."
            )
        if self.num_target_layers is None:
            return
        last = self.num_target_layers - 1
        bad = [i for i in self.target_layer_ids if not 0 <= i < last]
        if bad or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} must lie in 0..{last - 1} for a "
                f"target of {self.num_target_layers} layers (the last layer cannot be captured)."
            )

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], *, name: str = "(unnamed)") -> DrafterConfig:
        """Read a config.json of either format; reject variants this oracle does not support."""
        if "dflash_config" not in raw and not speculators_format.describes(raw):
            raise ValueError(
                "config.json has no dflash_config, so it is not a DFlash drafter. Pass a folder "
                f"whose architectures entry is {' or '.join(drafter_config.ARCHITECTURES)}."
            )
        raw = drafter_config.read(raw, name=name)
        dflash = raw["dflash_config"]
        num_layers = raw["num_hidden_layers"]
        block_size = _read_block_size(raw, dflash)
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=num_layers,
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab_size=raw["vocab_size"],
            block_size=block_size,
            num_target_layers=raw.get("num_target_layers") or dflash.get("num_target_layers"),
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            layer_types=tuple(raw.get("layer_types") or [FULL] * num_layers),
            sliding_window=raw.get("sliding_window"),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_read_rope_theta(raw),
            rope_scaling=_read_rope_scaling(raw),
            attention_bias=bool(raw.get("attention_bias")),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            eos_token_id=raw.get("eos_token_id"),
            pad_token_id=raw.get("pad_token_id"),
            draft_vocab_size=drafter_config.own_vocab_size(raw),
            causal_windows=drafter_config.has_causal_windows(raw),
            sample_from_anchor=drafter_config.samples_from_anchor(raw),
            scale_embedding=drafter_config.scales_embedding(raw),
            dflash2=dflash2_format.read(raw, name=name, block_size=block_size),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the config.json of the released format."""
        found = asdict(self)
        del found["dflash2"]
        dflash = {key: found.pop(key) for key in ("mask_token_id", "target_layer_ids")}
        # written only where they differ from a plain drafter's
        if not found.pop("causal_windows"):
            dflash[drafter_config.NON_CAUSAL] = True
        if found.pop("sample_from_anchor"):
            dflash["sample_from_anchor"] = True
        if not found.pop("scale_embedding"):
            dflash["scale_embedding"] = False
        architecture = drafter_config.PLAIN
        if self.dflash2 is not None:
            dflash |= self.dflash2.to_json()
            architecture = dflash2_format.ARCHITECTURE
        for key in ("draft_vocab_size", "num_target_layers", "rope_scaling"):
            if found[key] is None:
                del found[key]
        return found | {
            "architectures": [architecture],
            "attention_dropout": 0.0,
            "dflash_config": dflash,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "tie_word_embeddings": False,
            "use_sliding_window": SLIDING in self.layer_types,
        }


def _read_rope_scaling(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "default":
        return None
    ignored = ("type", "rope_theta")
    settings = {k: v for k, v in scaling.items() if k not in ignored and v is not None}
    unknown = sorted(set(settings) - set(YARN))
    if rope_type != "yarn" or unknown:
        raise ValueError(
            f"The reference computes RoPE unscaled or with YaRN's {', '.join(YARN[1:])}, but "
            f"config.json asks for {rope_type!r}{', with ' * bool(unknown)}{', '.join(unknown)}."
        )
    return settings | {"rope_type": rope_type}


def _read_block_size(raw: Mapping[str, Any], dflash: Mapping[str, Any]) -> int:
    found = {v for v in (raw.get("block_size"), dflash.get("block_size")) if v is not None}
    if len(found) != 1:
        raise ValueError(
            f"block_size is {raw.get('block_size')} at the top level of config.json and "
            f"{dflash.get('block_size')} in dflash_config. Give it once, or the same value twice."
        )
    return found.pop()


def _read_rope_theta(raw: Mapping[str, Any]) -> float:
    nested = raw.get("rope_parameters") or {}
    return float(raw.get("rope_theta") or nested.get("rope_theta") or 10000.0)
