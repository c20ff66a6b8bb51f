"""The drafter network on SGLang's layers. Architecture and tensor names are the checkpoints'.

A Qwen3-style stack that shares the target's embedding and, unless it has its own, its head. Only
block tokens pass through the layers; target tokens enter as draft KV, computed from features
outside the layers with `fc`, `hidden_norm` and each layer's `kv_weight`, `kv_bias` and `k_norm`.

With tensor parallelism the ranks share the layers, if heads and MLP can be divided among them.
Otherwise each rank runs the whole drafter, with all of the draft KV, and asks no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dflash import speculators_format
from sglang_dflash.config import DrafterSpec
from sglang_dflash.fp8_drafter import quantises_output
from sglang_dflash.glue import changes, compat, seams
from sglang_dflash.glue.models.embedding import masked, refuse_scaling, unscaled
from sglang_dflash.glue.models.own_head import OwnHead

# checkpoint name -> (our fused parameter, shard of it)
FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

CONFIG = changes.Fields(
    "the drafter's config",
    dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "intermediate_size"),
        "undoes SGLang's CPU padding of sizes not divisible by the TP size",
    ),
)


HEADS = changes.Fields(
    "the drafter's ModelConfig and its config",
    dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads"),
        "SGLang divides them by the TP size, but each rank has all heads of a whole drafter",
    ),
)


def tell_heads_of_each_rank(model_config: Any, spec: DrafterSpec) -> None:
    """Let SGLang's KV pool and attention backend find the heads that each rank has, although they
    divide a model's heads by the ranks. Call it before they are made."""
    tp_size = compat.get_parallel().tp_size
    copies = tp_size // spec.shards(tp_size)
    if copies > 1:
        for config in (model_config, model_config.hf_text_config):
            HEADS.write(
                config,
                num_attention_heads=spec.num_heads * copies,
                num_key_value_heads=spec.num_kv_heads * copies,
            )


class DraftAttention(nn.Module):
    """Attention of block tokens. `quant_config` applies to the output projection only: K and V of
    the context are projected with the QKV weights themselves (`kv_weight`)."""

    def __init__(self, config: Any, spec: DrafterSpec, layer: int, quant_config: Any) -> None:
        super().__init__()
        shards = spec.shards(compat.get_parallel().tp_size)
        self.head_dim = spec.head_dim
        self.q_size = spec.num_heads // shards * spec.head_dim
        self.kv_size = max(1, spec.num_kv_heads // shards) * spec.head_dim
        self.qkv_proj = compat.QKVParallelLinear(
            hidden_size=spec.hidden_size,
            head_size=spec.head_dim,
            total_num_heads=spec.num_heads,
            total_num_kv_heads=spec.num_kv_heads,
            bias=spec.has_bias,
            prefix=f"layers.{layer}.self_attn.qkv_proj",
            **seams.over_ranks(shards),
        )
        self.o_proj = compat.RowParallelLinear(
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            bias=spec.has_bias,
            quant_config=quant_config if quantises_output(spec) else None,
            prefix=f"layers.{layer}.self_attn.o_proj",
            **seams.over_ranks(shards),
        )
        self.q_norm = compat.RMSNorm(spec.head_dim, eps=config.rms_norm_eps)
        self.k_norm = compat.RMSNorm(spec.head_dim, eps=config.rms_norm_eps)
        rope_theta, rope_scaling = compat.get_rope_config(config)
        self.rotary_emb = compat.get_rope(
            spec.head_dim,
            rotary_dim=spec.head_dim,
            max_position=config.max_position_embeddings,
            base=rope_theta,
            rope_scaling=rope_scaling,
        )
        kind = compat.AttentionType
        self.attn = compat.RadixAttention(
            num_heads=self.q_size // spec.head_dim,
            head_dim=spec.head_dim,
            scaling=spec.head_dim**-0.5,
            num_kv_heads=self.kv_size // spec.head_dim,
            layer_id=layer,
            sliding_window_size=spec.window_left(layer),
            attn_type=kind.DECODER if spec.is_causal(layer) else kind.ENCODER_ONLY,
        )

    @property
    def kv_weight(self) -> Tensor:
        """The K and V rows of the fused QKV weight; follows a weight update."""
        return self.qkv_proj.weight[self.q_size :]

    @property
    def kv_bias(self) -> Tensor | None:
        """The bias of K and V, as in gpt-oss's drafters."""
        return None if self.qkv_proj.bias is None else self.qkv_proj.bias[self.q_size :]

    def forward(self, positions: Tensor, hidden: Tensor, forward_batch: Any) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        query = self.q_norm(query.reshape(-1, self.head_dim)).view_as(query)
        key = self.k_norm(key.reshape(-1, self.head_dim)).view_as(key)
        query, key = self.rotary_emb(positions, query, key)
        out, _ = self.o_proj(self.attn(query, key, value, forward_batch))
        return out


class DraftMLP(nn.Module):
    def __init__(self, spec: DrafterSpec, layer: int, quant_config: Any) -> None:
        super().__init__()
        shards = spec.shards(compat.get_parallel().tp_size)
        self.gate_up_proj = compat.MergedColumnParallelLinear(
            spec.hidden_size,
            [spec.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"layers.{layer}.mlp.gate_up_proj",
            **seams.over_ranks(shards),
        )
        self.down_proj = compat.RowParallelLinear(
            spec.intermediate_size,
            spec.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"layers.{layer}.mlp.down_proj",
            **seams.over_ranks(shards),
        )
        self.activation = compat.SiluAndMul()

    def forward(self, hidden: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(hidden)
        out, _ = self.down_proj(self.activation(gate_up))
        return out


class DraftLayer(nn.Module):
    def __init__(self, config: Any, spec: DrafterSpec, layer: int, quant_config: Any) -> None:
        super().__init__()
        self.input_layernorm = compat.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config, spec, layer, quant_config)
        self.post_attention_layernorm = compat.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(spec, layer, quant_config)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, forward_batch: Any
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.attend(positions, hidden, forward_batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.transform(hidden), residual

    def attend(self, positions: Tensor, hidden: Tensor, forward_batch: Any) -> Tensor:
        """Return what attention adds to the residual stream, from its normed input."""
        return self.self_attn(positions, hidden, forward_batch)

    def transform(self, hidden: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream, from its normed input."""
        return self.mlp(hidden)


class DFlashDraftModel(nn.Module):
    """The drafter. `share_embedding` must be called before the first forward."""

    layer_class = DraftLayer

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        _undo_padding(config)
        spec = DrafterSpec.from_loaded(config.to_dict(), name=config._name_or_path or "drafter")
        self.config = config
        self.spec = spec
        num_features = len(spec.target_layer_ids)
        self.fc = nn.Linear(num_features * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = compat.RMSNorm(spec.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            self.layer_class(config, spec, layer, quant_config) for layer in range(spec.num_layers)
        )
        self.norm = compat.RMSNorm(spec.hidden_size, eps=config.rms_norm_eps)
        self.own_head = None if spec.own_vocab_size is None else OwnHead(spec)
        self._embed: Callable[[Tensor], Tensor] | None = None

    def share_embedding(self, embedding: nn.Module, mask: Tensor | None = None) -> None:
        """Embed block tokens with the target's embedding, including its scaling if the drafter was
        trained with it. `mask` [H] takes the place of the mask token's."""
        embed = embedding if self.spec.scales_embedding else unscaled(embedding)
        if mask is not None:
            if self.spec.scales_embedding:
                refuse_scaling(embedding, self.spec.name)
            embed = masked(embed, self.spec.mask_token_id, mask.to(self.fc.weight))
        self._embed = embed

    def get_attention_sliding_window_size(self) -> int | None:
        """Return the sliding window as SGLang counts it, without the query token."""
        return None if self.spec.sliding_window is None else self.spec.sliding_window - 1

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **_unused: Any
    ) -> Any:
        """Return the final normed hidden states of all block tokens as `hidden_states`."""
        assert self._embed is not None, "share_embedding was not called"
        hidden, residual = self._embed(input_ids).to(self.fc.weight.dtype), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, forward_batch)
        hidden, _ = self.norm(hidden, residual)
        return compat.LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a released checkpoint. Raise ValueError unless every parameter is filled exactly
        once, with the right shape, and every tensor has a parameter."""
        params: dict[str, Tensor] = dict(self.named_parameters())
        if self.own_head is not None:
            params |= self.own_head.named_tensors(prefix="own_head.")
        missing = {name: len(_parts_of(name)) for name in params}
        whole_shapes = _whole_shapes(self.spec)
        unknown = []
        for raw_name, tensor in weights:
            name, part = _our_name(raw_name.removeprefix("model."))
            if name not in params and self._is_targets_own(raw_name):
                continue
            if name not in params:
                unknown.append(raw_name)
                continue
            param: Any = params[name]
            wanted = whole_shapes.get(f".{raw_name}".split(".")[-2], param.shape)
            wanted = wanted[: tensor.dim()] if raw_name.endswith(".bias") else wanted
            if wanted != tensor.shape:
                raise ValueError(
                    f"{raw_name} of the drafter {self.spec.name} has shape {list(tensor.shape)}, "
                    f"but its config asks for {list(wanted)}. Config and weights do not match."
                )
            if part is None:
                getattr(param, "weight_loader", compat.default_weight_loader)(param, tensor)
            else:
                param.weight_loader(param, tensor, part)
            missing[name] -= 1
        unfilled = sorted(name for name, parts in missing.items() if parts)
        if unfilled or unknown:
            raise ValueError(
                f"The weights of the drafter {self.spec.name} are not those of a DFlash drafter: "
                f"missing {unfilled or 'nothing'}, unknown {unknown or 'nothing'}. "
                "Download the checkpoint again, or use another one."
            )
        if self.own_head is not None:
            self.own_head.check()

    def _is_targets_own(self, name: str) -> bool:
        # of the formats, only the other one has such tensors, and it does not scale embeddings
        return not self.spec.scales_embedding and speculators_format.is_targets_own(
            name, whole_vocabulary=self.own_head is None
        )


def _whole_shapes(spec: DrafterSpec) -> dict[str, tuple[int, int]]:
    """Return the unsharded shapes of weights that ranks may shard, by checkpoint name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query = spec.num_heads * spec.head_dim
    key = spec.num_kv_heads * spec.head_dim
    return {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _our_name(name: str) -> tuple[str, Any]:
    if name in (speculators_format.HEAD, speculators_format.OFFSETS):
        return f"own_head.{name}", None
    for theirs, (ours, part) in FUSED.items():
        if f".{theirs}." in name:
            return name.replace(theirs, ours), part
    return name, None


def _parts_of(name: str) -> list[Any]:
    return [part for ours, part in FUSED.values() if f".{ours}." in name] or [None]


def _undo_padding(config: Any) -> None:
    """Restore a config's own sizes: on a CPU SGLang pads those not divisible by the ranks."""
    for name, own in (
        ("num_attention_heads", "original_num_attention_heads"),
        ("num_key_value_heads", "original_total_num_kv_heads"),
        ("intermediate_size", "original_intermediate_size"),
    ):
        if hasattr(config, own):
            CONFIG.write(config, **{name: getattr(config, own)})


# SGLang's registry reads the architecture from the class name
EntryClass = DFlashDraftModel
