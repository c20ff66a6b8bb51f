"""The drafter in plain torch: the oracle every faster implementation is judged against.

It deliberately shares no code with the rest of the package except for reading configs. Clarity
beats speed: masks are explicit boolean tensors, nothing is fused, and inference and training use
the same layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash import mask_embedding, speculators_format
from sglang_dflash.reference.config import FULL, SLIDING, DrafterConfig
from sglang_dflash.reference.dflash2 import BlockConvolution, CandidateSelector
from sglang_dflash.reference.rope import Rope

__all__ = ["FULL", "SLIDING", "ContextKV", "Drafter", "DrafterConfig", "block_mask", "rotate"]


@dataclass(frozen=True)
class ContextKV:
    """Draft K/V of a context, one entry per layer. Index t of every tensor is position t."""

    keys: tuple[Tensor, ...]  # each [b, T, kv_heads, head_dim], after k-norm and RoPE
    values: tuple[Tensor, ...]  # each [b, T, kv_heads, head_dim]

    def __len__(self) -> int:
        return self.keys[0].shape[1]

    def extend(self, new: ContextKV) -> ContextKV:
        """Return this context followed by `new`; neither is changed."""
        return ContextKV(
            tuple(torch.cat(pair, dim=1) for pair in zip(self.keys, new.keys, strict=True)),
            tuple(torch.cat(pair, dim=1) for pair in zip(self.values, new.values, strict=True)),
        )


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(
    x: Tensor,  # [b, T, heads, head_dim]
    positions: Tensor,  # [b, T] int64
    *,
    rope: Rope,
) -> Tensor:
    """Apply RoPE to the two halves of the head dimension (neox style)."""
    half = x.shape[-1] // 2
    angles = positions[..., None].float() * rope.frequencies(half).to(x.device)
    cos, sin = (rope.amplitude * wave[:, :, None] for wave in (angles.cos(), angles.sin()))
    low, high = x.float().split(half, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim, self.rope = config.head_dim, Rope(config.rope_theta, config.rope_scaling)
        bias = config.attention_bias
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return k (after norm and RoPE) and v of `x`, for context and block rows alike."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(k, positions, rope=self.rope), v

    def forward(
        self,
        x: Tensor,  # [b, Q, H]
        positions: Tensor,  # [b, Q] int64
        *,
        context_k: Tensor,  # [b, T, kv_heads, head_dim]
        context_v: Tensor,  # [b, T, kv_heads, head_dim]
        mask: Tensor,  # [b, Q, T + Q] bool, True where the query attends to the key
    ) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        q = rotate(q, positions, rope=self.rope)
        block_k, block_v = self.key_value(x, positions)
        k = torch.cat((context_k, block_k), dim=1)
        v = torch.cat((context_v, block_v), dim=1)
        group = q.shape[2] // k.shape[2]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.repeat_interleave(group, dim=2).transpose(1, 2),
            v.repeat_interleave(group, dim=2).transpose(1, 2),
            attn_mask=mask[:, None],
            scale=self.head_dim**-0.5,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.attention_conv: BlockConvolution | None = None
        self.mlp_conv: BlockConvolution | None = None
        if config.dflash2 is not None:
            self.attention_conv = BlockConvolution(config.dflash2, config.hidden_size)
            self.mlp_conv = BlockConvolution(config.dflash2, config.hidden_size)

    def forward(
        self, x: Tensor, positions: Tensor, *, block_size: int, **attention: Tensor
    ) -> Tensor:
        attend = partial(self.self_attn, positions=positions, **attention)
        x = x + _around(attend, self.attention_conv, self.input_layernorm(x), block_size)
        return x + _around(self.mlp, self.mlp_conv, self.post_attention_layernorm(x), block_size)


def _around(
    sublayer: Callable[[Tensor], Tensor],
    convolution: BlockConvolution | None,
    x: Tensor,
    block_size: int,
) -> Tensor:
    if convolution is None:
        return sublayer(x)
    return convolution.around(sublayer, x, block_size=block_size)


class Layers(nn.ModuleList):
    """A ModuleList typed to hold `Layer`s."""

    def __iter__(self) -> Iterator[Layer]:
        return cast(Iterator[Layer], super().__iter__())


def block_mask(
    positions: Tensor,  # [b, N, B] int64, column 0 is the anchor's position
    *,
    context_lens: Tensor,  # [b] int64, valid context rows
    context_size: int,
    window: int | None,
    causal: bool = True,
) -> Tensor:
    """Return the attention mask of N independent blocks, [b, N*B, context_size + N*B] bool.

    A query attends to the context strictly before its block's anchor (the anchor has no feature
    yet) and to its own block. `window` None: to the whole block. With a sliding window: to
    positions p - window < key <= p, or < p + window if the block is not causal.
    """
    b, blocks, size = positions.shape
    query = positions.flatten(1)[:, :, None]
    anchor = positions[:, :, :1].expand(-1, -1, size).flatten(1)[:, :, None]
    context = torch.arange(context_size, device=positions.device)[None, None]
    sees_context = (context < anchor) & (context < context_lens[:, None, None])
    owner = torch.arange(blocks, device=positions.device).repeat_interleave(size)
    sees_block = (owner[:, None] == owner[None]).expand(b, -1, -1)
    if window is not None:
        key = positions.flatten(1)[:, None, :]
        sees_context = sees_context & (context > query - window)
        last = query if causal else query + window - 1
        sees_block = sees_block & (key <= last) & (key > query - window)
    return torch.cat((sees_context, sees_block), dim=-1)


class Drafter(nn.Module):
    """A DFlash drafter. Parameter names are those of the released checkpoints."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = Layers(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector: CandidateSelector | None = None
        if config.dflash2 is not None:
            self.candidate_selector = CandidateSelector(
                config.dflash2, hidden_size=config.hidden_size, vocab_size=config.vocab_size
            )
        self.mask_row: Tensor | None = None  # [H], a learned embedding; None for the target's
        self.lm_head: nn.Linear | None = None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            # target token of the drafter's token i, minus i
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            self.register_buffer("d2t", offsets)

    def embed(
        self,
        target_embedding: nn.Module,
        token_ids: Tensor,  # [...] int64
    ) -> Tensor:
        """Return the target's embedding of block tokens, [..., H], or a learned one of the mask."""
        if self.config.scale_embedding:
            # the module, not its weight: some targets scale embeddings in its forward
            found = target_embedding(token_ids)
        else:
            found = F.embedding(token_ids, cast(Tensor, target_embedding.weight))
        if self.mask_row is None:
            return found
        is_mask = (token_ids == self.config.mask_token_id)[..., None]
        return torch.where(is_mask, self.mask_row.to(found), found)

    def drafted_rows(
        self,
        hidden: Tensor,  # [..., B, H]
    ) -> Tensor:
        """Return the rows of a block that drafts are read from, [..., B - 1, H]."""
        return hidden[..., :-1, :] if self.config.sample_from_anchor else hidden[..., 1:, :]

    def logits(
        self,
        hidden: Tensor,  # [n, H]
        target_head: nn.Module,
    ) -> Tensor:
        """Return logits over the target's vocabulary, [n, V]; -inf for a token that a head of its
        own does not have."""
        if self.lm_head is None:
            return target_head(hidden.to(cast(Tensor, target_head.weight).dtype))
        own = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        offsets = cast(Tensor, self.d2t)
        tokens = offsets + torch.arange(len(offsets), device=offsets.device)
        whole = own.new_full((len(own), self.config.vocab_size), float("-inf"))
        return whole.index_copy(1, tokens, own)

    def logits_after(
        self,
        previous: int,
        logits: Tensor,  # [V], of `logits`
        hidden: Tensor,  # [H], the row they come from
    ) -> Tensor:
        """Return the logits of the draft that follows `previous`, [V]; -inf for a token that a
        selector does not let follow."""
        selector = self.candidate_selector
        return logits if selector is None else selector.after(previous, logits, hidden)

    def project(
        self,
        features: Tensor,  # [..., K * H]
    ) -> Tensor:
        """Return the context row of each target token, [..., H]."""
        return self.hidden_norm(self.fc(features))

    def context_kv(
        self,
        projected: Tensor,  # [b, T, H]
        positions: Tensor,  # [b, T] int64
    ) -> ContextKV:
        """Return every layer's K/V of context rows. They skip input_layernorm by design."""
        pairs = [layer.self_attn.key_value(projected, positions) for layer in self.layers]
        return ContextKV(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))

    def forward(
        self,
        embeddings: Tensor,  # [b, B, H], the target's own embedding of anchor and masks
        positions: Tensor,  # [b, B] int64
        *,
        context: ContextKV,
        context_lens: Tensor | None = None,  # [b] int64; None: all context rows are valid
    ) -> Tensor:
        """Return the normed hidden state of one block per row, [b, B, H]."""
        if context_lens is None:
            context_lens = positions.new_full((positions.shape[0],), len(context))
        return self._run(embeddings, positions[:, None], context, context_lens)

    def forward_anchors(
        self,
        embeddings: Tensor,  # [b, N, B, H]
        anchors: Tensor,  # [b, N] int64, each anchor's position
        *,
        context: ContextKV,  # of the whole sequence, shared by its N blocks
        context_lens: Tensor,  # [b] int64
    ) -> Tensor:
        """Return the normed hidden states of N independent blocks per row, [b, N, B, H]."""
        size = embeddings.shape[2]
        positions = anchors[:, :, None] + torch.arange(size, device=anchors.device)
        hidden = self._run(embeddings.flatten(1, 2), positions, context, context_lens)
        return hidden.unflatten(1, (-1, size))

    def _run(
        self,
        x: Tensor,  # [b, N * B, H]
        positions: Tensor,  # [b, N, B] int64
        context: ContextKV,
        context_lens: Tensor,  # [b] int64
    ) -> Tensor:
        windows = {FULL: None, SLIDING: self.config.sliding_window}
        masks = {
            kind: block_mask(
                positions,
                context_lens=context_lens,
                context_size=len(context),
                window=windows[kind],
                causal=self.config.causal_windows,
            )
            for kind in set(self.config.layer_types)
        }
        flat = positions.flatten(1)
        for i, layer in enumerate(self.layers):
            x = layer(
                x,
                flat,
                block_size=positions.shape[2],
                context_k=context.keys[i],
                context_v=context.values[i],
                mask=masks[self.config.layer_types[i]],
            )
        return self.norm(x)

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> Drafter:
        """Load a drafter folder of either format, ready for inference."""
        folder = Path(folder)
        raw = json.loads((folder / "config.json").read_text())
        config = DrafterConfig.from_json(raw, name=str(folder))
        weights: dict[str, Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            weights.update(load_file(shard))
        drafter = cls(config)
        if speculators_format.describes(raw):
            weights = speculators_format.drafters_own(
                weights, whole_vocabulary=config.draft_vocab_size is None
            )
        drafter.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()})
        drafter.mask_row = mask_embedding.read(
            folder,
            name=str(folder),
            mask_token_id=config.mask_token_id,
            hidden_size=config.hidden_size,
        )
        return drafter.to(dtype).eval().requires_grad_(False)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and bfloat16 weights in the released format."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.config.to_json(), indent=2, sort_keys=True)
        (folder / "config.json").write_text(text + "\n")
        weights = {
            name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in self.state_dict().items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
