"""The training forward pass: many blocks per sequence through the drafter at once.

Equivalent to the oracle (`Drafter.forward_anchors`) and built from its modules; only the attention
and the target's forward pass differ. Two attention implementations:

- "sdpa" with a dense mask, [b, N*B, S + N*B]: no compilation, for CPUs and moderate sizes;
- "flex" with a block-sparse mask that skips masked tiles: compiled on a GPU, about half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from sglang_dflash.reference.generate import check_layer_ids
from sglang_dflash.reference.model import FULL, SLIDING, Drafter, block_mask, rotate
from sglang_dflash.train.batches import Batch

# (q [b, heads, Q, d], k and v [b, heads, K, d]) -> [b, heads, Q, d]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# above this size a dense mask costs more than compiling flex attention
DENSE_MASK_BYTES = 2**30


def choose_attention(
    device: torch.device, *, tokens_per_batch: int, blocks: int, block_size: int, max_length: int
) -> str:
    """Return "flex" on a GPU if the dense mask of a batch would exceed 1 GiB, else "sdpa"."""
    rows = max(1, tokens_per_batch // max_length)
    queries = blocks // rows * block_size
    mask_bytes = 2 * rows * queries * (max_length + queries)
    return "flex" if device.type == "cuda" and mask_bytes > DENSE_MASK_BYTES else "sdpa"


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """Return the target's text layers."""
    count = target.config.get_text_config().num_hidden_layers
    for name, module in target.base_model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers") and len(module) == count:
            return module
    raise ValueError(
        f"{type(target).__name__} has no list of {count} layers to take features from. Use a "
        "decoder-only transformers model."
    )


def linear_head(target: PreTrainedModel) -> nn.Linear:
    """Return the target's LM head."""
    head = target.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"The LM head of {type(target).__name__} is a {type(head).__name__}, but training "
            "needs a linear one. Load the target without quantization."
        )
    return head


class TargetPass(NamedTuple):
    features: Tensor  # [b, S, K * H]
    hidden: Tensor  # [b, S, H]; input of the LM head


@torch.no_grad()
def run_target(
    target: PreTrainedModel,
    token_ids: Tensor,  # [b, S] int64
    layer_ids: Sequence[int],
) -> TargetPass:
    """Return features and final hidden states of every token, without running the LM head."""
    check_layer_ids(target, layer_ids)
    layers = decoder_layers(target)
    found: dict[int, Tensor] = {}

    def keep(layer_id: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            found[layer_id] = output if isinstance(output, Tensor) else output[0]

        return hook

    hooks = [layers[i].register_forward_hook(keep(i)) for i in set(layer_ids)]
    try:
        output = target.base_model(input_ids=token_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    features = torch.cat([found[i] for i in layer_ids], dim=-1)
    return TargetPass(features, output.last_hidden_state)


def embed_blocks(
    target: PreTrainedModel, drafter: Drafter, batch: Batch, anchors: Tensor
) -> Tensor:
    """Return the target's embeddings of each block, [b, N, B, H]: anchor, then mask tokens."""
    config = drafter.config
    ids = anchors.new_full((*anchors.shape, config.block_size), config.mask_token_id)
    ids[:, :, 0] = batch.token_ids.gather(1, anchors)
    with torch.no_grad():
        return drafter.embed(target.get_input_embeddings(), ids)


def run_blocks(
    target: PreTrainedModel,
    drafter: Drafter,
    batch: Batch,
    anchors: Tensor,  # [b, N] int64
    *,
    features: Tensor,  # [b, S, K * H]
    attention: str,
) -> Tensor:
    """Return the normed hidden states of the drafted slots, [b, N, B - 1, H]."""
    config = drafter.config
    places = torch.arange(features.shape[1], device=features.device).expand_as(batch.token_ids)
    positions = anchors[:, :, None] + torch.arange(config.block_size, device=anchors.device)
    x = embed_blocks(target, drafter, batch, anchors).flatten(1, 2)
    with _autocast(x):
        context = drafter.context_kv(drafter.project(features), places)
        windows = {FULL: None, SLIDING: config.sliding_window}
        attend = {
            kind: _ATTENTION[attention](
                positions, batch.lens, len(context), windows[kind], config.causal_windows
            )
            for kind in set(config.layer_types)
        }
        flat = positions.flatten(1)
        for layer, kind, past_k, past_v in zip(
            drafter.layers, config.layer_types, context.keys, context.values, strict=True
        ):
            own = layer.self_attn
            h = layer.input_layernorm(x)
            q = own.q_norm(own.q_proj(h).unflatten(-1, (-1, own.head_dim)))
            q = rotate(q, flat, rope=own.rope)
            k, v = own.key_value(h, flat)
            k = torch.cat((past_k.to(v.dtype), k.to(v.dtype)), dim=1)
            v = torch.cat((past_v, v), dim=1)
            group = q.shape[2] // k.shape[2]
            out = attend[kind](
                q.to(v.dtype).transpose(1, 2),
                k.repeat_interleave(group, dim=2).transpose(1, 2),
                v.repeat_interleave(group, dim=2).transpose(1, 2),
            )
            x = x + own.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return drafter.norm(x).unflatten(1, (-1, config.block_size))[:, :, 1:]


def _autocast(x: Tensor) -> AbstractContextManager[object]:
    # fp32 master weights; on a CPU everything is fp32, as in serving
    return torch.autocast("cuda", torch.bfloat16) if x.is_cuda else nullcontext()


def _dense(
    positions: Tensor, lens: Tensor, context_size: int, window: int | None, causal: bool
) -> Attend:
    mask = block_mask(
        positions, context_lens=lens, context_size=context_size, window=window, causal=causal
    )[:, None]
    # without cuDNN, which builds a plan for each new shape
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        with sdpa_kernel(kernels) if q.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return attend


def _sparse(
    positions: Tensor, lens: Tensor, context_size: int, window: int | None, causal: bool
) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask

    b, _, size = positions.shape
    anchors, flat = positions[:, :, 0].contiguous(), positions.flatten(1)
    queries = flat.shape[1]

    def sees(b: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # clamped: both branches are evaluated for every key
        block_key = (kv - context_size).clamp(min=0)
        in_context = (kv < context_size) & (kv < anchors[b, q // size])
        in_block = (kv >= context_size) & (block_key // size == q // size)
        if window is not None:
            query, key = flat[b, q], flat[b, block_key]
            in_context = in_context & (kv > query - window)
            last = query if causal else query + window - 1
            in_block = in_block & (key <= last) & (key > query - window)
        return in_context | in_block

    device = str(positions.device)
    mask = create_block_mask(sees, b, None, queries, context_size + queries, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = _compiled_flex() if q.is_cuda else _flex()
        return call(q, k, v, block_mask=mask, scale=q.shape[-1] ** -0.5)

    return attend


def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(_flex())


_ATTENTION: dict[str, Callable[[Tensor, Tensor, int, int | None, bool], Attend]] = {
    "sdpa": _dense,
    "flex": _sparse,
}
