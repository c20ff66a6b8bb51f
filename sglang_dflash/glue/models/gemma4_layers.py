"""A Gemma-4 layer's verify pass in fewer launches: the ops between its GEMMs are fused.

The forward of each layer is replaced on the instance, for verify blocks only. Norms and RoPE of q,
k and v are one launch, and so are the norms around a residual, even across a layer boundary. With
few rows, GEMMs of shapes that measured faster run as `thin_linear`. The kernels are in
`kernels/gemma_layer/`. The experts themselves stay SGLang's, and so do GEMMs of quantised weights.

With tensor parallelism every rank fuses its shard. Its heads are whole, and what is normalised is a
sum over the ranks, so the output of attention, MLP and experts is summed first, as SGLang does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.glue import changes, compat, seams
from sglang_dflash.kernels import Ops

PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def install_fused_layers(model: Any, ops: Ops) -> str:
    """Fuse every layer of a Gemma-4 target; return which implementation runs the layers."""
    layers = _layers_of(model)
    if not layers:
        return "sglang"
    group = compat.get_tp_group()
    reasons = {_why_not(layer, ranks=group.world_size) for layer in layers} - {None}
    if reasons:
        return f"sglang ({', '.join(sorted(map(str, reasons)))})"
    following: FusedLayer | None = None
    for layer in reversed(layers):
        following = FusedLayer(layer, following, ops, group)
    return f"sglang_dflash.{ops.name}"


def describe_layers(serves: str, ops: Ops, model: Any) -> dict[str, str]:
    """Return what runs the fused ops that are not ours, given what runs the layers."""
    if serves == f"sglang_dflash.{ops.name}":
        has_quantised = any(
            _is_quantised(m) for layer in _layers_of(model) for m in _products(layer)
        )
        return {"thin_linear": "sglang (where weights are quantised)"} if has_quantised else {}
    reason = "sglang (the fused layer is for Gemma 4 only)" if serves == "sglang" else serves
    return dict.fromkeys(("norm_and_rotate_qkv", "norm_add_norm", "thin_linear"), reason)


def fold_router_scales(model: Any) -> None:
    """Fold the scale of every Gemma-4 router into its norm again, after a weight update.

    SGLang folds once, before the first forward, and would keep the old scale.
    """
    for module in model.modules():
        if type(module).__name__ == "Gemma4Router" and module._scale_fused:
            module.fuse_scale()


def _layers_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__ == "Gemma4DecoderLayer"]


def _products(layer: Any) -> list[Any]:
    """Return the linear modules of a layer, without its experts."""
    return [layer.get_submodule(path) for path in PRODUCTS]


def _is_quantised(module: Any) -> bool:
    return type(module.quant_method).__name__ != "UnquantizedLinearMethod"


def _why_not(layer: Any, *, ranks: int) -> str | None:
    """Return what the fused layer does not support in a layer; None if it supports all of it."""
    attention = layer.self_attn
    if layer.has_ple:
        return "per-layer embeddings"
    if attention.is_kv_shared_layer:
        return "shared KV"
    norms = (attention.q_norm, attention.k_norm)
    if any(norm.scale_shift for norm in norms) or attention.v_norm.with_scale:
        return "different norms of q, k and v"
    for module in _products(layer):
        if isinstance(module, compat.BaseLayerWithLoRA):
            return "LoRA"
        if module.bias is not None:
            return "bias"
        if seams.ranks_of(module) != ranks:
            return "layers on some of the ranks"
        if getattr(module, "use_intel_amx_backend", False):
            return "packed weights"
    return None


class FusedLayer:
    """One layer's verify pass. It also applies the next layer's input norm to its result."""

    def __init__(self, layer: Any, following: FusedLayer | None, ops: Ops, group: Any) -> None:
        """`group` is SGLang's group of the ranks over which the layer is divided."""
        self._layer = layer
        self._following = following
        self._ops = ops
        self._group = group if group.world_size > 1 else None
        self._quantised = frozenset(filter(_is_quantised, _products(layer)))
        self._original = layer.forward
        # the previous layer's result, and that result with our input norm applied
        self._ready: tuple[Tensor, Tensor] | None = None
        changes.replace(
            layer, "forward", self.forward, why="a verify pass fuses the ops between GEMMs"
        )

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor,
        per_layer_input: Tensor | None,
        forward_batch: Any,
        **unusual: Any,
    ) -> Any:
        """Compute what SGLang's layer computes."""
        if not forward_batch.forward_mode.is_target_verify():
            return self._original(
                positions, hidden_states, per_layer_input, forward_batch, **unusual
            )
        seams.enter_gemma_layer(hidden_states, unusual)
        layer = self._layer
        residual, normed = self._ops.norm_add_norm(
            self._attend(self._normed(hidden_states), positions, forward_batch),
            hidden_states,
            norm_weight=layer.post_attention_layernorm.weight,
            next_weights=self._middle_norms(),
            scale=None,
            eps=layer.post_attention_layernorm.variance_epsilon,
        )
        following = self._following
        result, ready = self._ops.norm_add_norm(
            self._feed_forward(normed[0]),
            residual,
            norm_weight=layer.post_feedforward_layernorm.weight,
            next_weights=() if following is None else (following.first_norm,),
            scale=layer.layer_scalar,
            eps=layer.post_feedforward_layernorm.variance_epsilon,
            expert_branch=self._expert_branch(*normed[1:]) if layer.enable_moe_block else None,
        )
        if following is not None:
            following._ready = (result, ready[0])
        return seams.leave_gemma_layer(result, forward_batch)

    def _middle_norms(self) -> tuple[Tensor, ...]:
        """Return the norm weights after attention: for the MLP, the router and the experts."""
        layer = self._layer
        if not layer.enable_moe_block:
            return (layer.pre_feedforward_layernorm.weight,)
        if not layer.router._scale_fused:
            layer.router.fuse_scale()
        return (
            layer.pre_feedforward_layernorm.weight,
            layer.router.norm.weight,
            layer.pre_feedforward_layernorm_2.weight,
        )

    def _expert_branch(
        self, for_router: Tensor, for_experts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts' output [n, H], and the norm weights of the MLP's output and of it."""
        layer = self._layer
        answer = seams.sum_experts(layer.moe(for_experts, layer.router.proj(for_router)[0]))
        mlp_norm, own_norm = layer.post_feedforward_layernorm_1, layer.post_feedforward_layernorm_2
        return answer, mlp_norm.weight, own_norm.weight

    @property
    def first_norm(self) -> Tensor:
        return self._layer.input_layernorm.weight

    def _normed(self, hidden_states: Tensor) -> Tensor:
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is hidden_states:
            return ready[1]
        return self._layer.input_layernorm(hidden_states)

    def _attend(self, x: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        """Return the attention output as split-K partial sums, [S, n, H]."""
        own = self._layer.self_attn
        partial_sums = self._thin_linear(x, own.qkv_proj)
        qkv = own.qkv_proj(x)[0] if partial_sums is None else _total(partial_sums, x)
        self._ops.norm_and_rotate_qkv(
            qkv,
            positions,
            q_weight=own.q_norm.weight,
            k_weight=own.k_norm.weight,
            cos_sin=own.rotary_emb.cos_sin_cache,
            q_heads=own.num_heads,
            kv_heads=own.num_kv_heads,
            eps=own.q_norm.eps,
        )
        heads = qkv.unflatten(-1, (-1, own.head_dim))
        sizes = (own.num_heads, own.num_kv_heads, own.num_kv_heads)
        attended = own.attn(*heads.split(sizes, dim=1), forward_batch=forward_batch)
        return self._sum_over_ranks(attended.flatten(1), own.o_proj)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Return the MLP output as split-K partial sums, [S, n, H]."""
        mlp = self._layer.mlp
        return self._sum_over_ranks(mlp.act_fn(mlp.gate_up_proj(x)[0]), mlp.down_proj)

    def _thin_linear(self, x: Tensor, linear: Any) -> Tensor | None:
        """Return a product as split-K partial sums [S, n, N]; None if SGLang's GEMM computes it."""
        return None if linear in self._quantised else self._ops.thin_linear(x, linear.weight)

    def _sum_over_ranks(self, x: Tensor, linear: Any) -> Tensor:
        """Return a product whose depth is divided over the ranks, as partial sums [S, n, H]: those
        of the kernel, or with several ranks a single one, their sum in x's dtype."""
        partial_sums = self._thin_linear(x, linear)
        if partial_sums is None:
            partial_sums = linear(x, skip_all_reduce=True)[0][None]
        if self._group is None:
            return partial_sums
        return self._group.all_reduce(_total(partial_sums, x))[None]


def _total(partial_sums: Tensor, x: Tensor) -> Tensor:
    """Return the sum of split-K partial sums in x's dtype, [n, N]."""
    return partial_sums[0] if len(partial_sums) == 1 else partial_sums.sum(0).to(x.dtype)
