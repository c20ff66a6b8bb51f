"""Torch twins of every op: the specification, and the path that runs on a CPU.

No op of a step reads a tensor's value on the host, so each is safe under CUDA-graph capture and
costs no synchronisation. `verify_attention` does: it is a specification only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# slot 0 of every KV pool is scratch: what must not be kept is written there
SCRATCH_SLOT = 0


def build_block(
    anchors: Tensor,  # [b] int64
    lens: Tensor,  # [b] int64
    rows: Tensor,  # [b] int64
    slot_table: Tensor,  # [rows, width] int
    *,
    mask_token_id: int,
    last_position: int,
    token_ids: Tensor,  # [b, B] int64, written
    positions: Tensor,  # [b, B] int64, written
    slots: Tensor,  # [b, B] int64, written
) -> None:
    """Fill a block with the anchor and B - 1 masks, at the positions and slots from `lens` on.

    Positions stop at `last_position`: rows past the context can never be committed, but their
    position must stay inside every RoPE table.
    """
    offsets = torch.arange(token_ids.shape[1], device=lens.device)
    token_ids.fill_(mask_token_id)
    token_ids[:, 0] = anchors
    columns = lens[:, None] + offsets
    slots.copy_(slot_table[rows[:, None], columns])
    torch.clamp(columns, max=last_position, out=positions)


def accept_walk(
    token_ids: Tensor,  # [b, B] int64, anchor then drafts
    choices: Tensor,  # [b, B] int64
) -> tuple[Tensor, Tensor]:
    """Return (num_correct [b] int32, bonus [b] int64).

    Draft k + 1 is correct when it equals the choice after row k and every draft before it is.
    """
    matches = token_ids[:, 1:] == choices[:, :-1]
    num_correct = matches.to(torch.int32).cumprod(dim=1, dtype=torch.int32).sum(dim=1)
    bonus = choices.gather(1, num_correct[:, None]).squeeze(1)
    return num_correct.to(torch.int32), bonus


def commit_tokens(
    token_ids: Tensor,  # [b, B] int64, anchor then drafts
    num_correct: Tensor,  # [b] int32
    bonus: Tensor,  # [b] int64
    lens: Tensor,  # [b] int64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (commit lens [b] int32, committed tokens [b, B] int64 padded with 0, new lens [b])."""
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    drafts = torch.roll(token_ids, -1, dims=1)
    count = num_correct[:, None]
    committed = torch.where(columns < count, drafts, 0)
    committed = torch.where(columns == count, bonus[:, None], committed)
    commit_lens = num_correct + 1
    return commit_lens, committed, lens + commit_lens


def committed_slots(
    slots: Tensor,  # [b, B] int64
    commit_lens: Tensor,  # [b] int32
) -> Tensor:
    """Return the slots with every row past the commit redirected to the scratch slot."""
    columns = torch.arange(slots.shape[1], device=slots.device)
    return torch.where(columns < commit_lens[:, None], slots, SCRATCH_SLOT)


def paged_attention(
    query: Tensor,  # [b, q, heads, d]
    key_cache: Tensor,  # [slots, kv_heads, d]
    value_cache: Tensor,  # [slots, kv_heads, dv]
    slots: Tensor,  # [b, width] int, the slot of each key position
    kv_lens: Tensor,  # [b] int, keys per request
    query_positions: Tensor,  # [b, q] int
    *,
    scale: float,
    causal: bool,
    window_left: int = -1,  # keys a query sees to its left, -1 for all
    logit_cap: float = 0.0,
) -> Tensor:
    """Attend over keys gathered by slot; return [b, q, heads, dv].

    Columns that no query may see read the request's last key instead of their own slot, so that
    whatever stands in a freed or foreign slot, NaN included, never enters the arithmetic.
    """
    kv_lens = kv_lens.long()
    columns = torch.arange(slots.shape[1], device=query.device)
    visible = (columns < kv_lens[:, None])[:, None, :].expand(-1, query.shape[1], -1)
    if causal:
        visible = visible & (columns <= query_positions[:, :, None])
    if window_left >= 0:
        visible = visible & (columns >= query_positions[:, :, None] - window_left)
    last_slot = slots.gather(1, (kv_lens - 1)[:, None])
    slots = torch.where(visible.any(dim=1), slots, last_slot)

    group = query.shape[2] // key_cache.shape[1]
    query = query.transpose(1, 2)
    keys = key_cache[slots].to(query.dtype).transpose(1, 2).repeat_interleave(group, dim=1)
    values = value_cache[slots].to(query.dtype).transpose(1, 2).repeat_interleave(group, dim=1)
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(query @ keys.transpose(-1, -2) * (scale / logit_cap))
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        return (torch.softmax(scores, dim=-1) @ values).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible[:, None], scale=scale
    )
    return out.transpose(1, 2)


def verify_attention(
    query: Tensor,  # [n * B, heads, d]
    block_keys: Tensor,  # [n * B, kv_heads, d]
    block_values: Tensor,  # [n * B, kv_heads, dv]
    out: Tensor,  # [n * B, heads, dv], written
    key_cache: Tensor,  # [slots, kv_heads, d]
    value_cache: Tensor,  # [slots, kv_heads, dv]
    kv_indptr: Tensor,  # [n + 1] int
    kv_indices: Tensor,  # [keys] int, slots of the prefixes
    *,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    window_left: int = -1,  # keys a row sees to its left, -1 for all
    logit_cap: float = 0.0,
) -> None:
    """Attend from each block over its request's prefix and, causally, over the block itself.

    The scales undo the quantisation of the caches; the block's own keys and values need none.
    """
    bounds = kv_indptr.tolist()
    rows = query.shape[0] // (len(bounds) - 1)
    group = query.shape[1] // block_keys.shape[1]
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        block = slice(i * rows, (i + 1) * rows)
        slots = kv_indices[first:last].long()
        keys = torch.cat([key_cache[slots].float() * key_scale, block_keys[block].float()])
        values = torch.cat([value_cache[slots].float() * value_scale, block_values[block].float()])
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[block].float(), keys) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        position = torch.arange(len(keys), device=query.device)
        distance = position[last - first :, None] - position
        hidden = distance < 0
        if window_left >= 0:
            hidden |= distance > window_left
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out[block] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def context_kv(
    features: Tensor,  # [n, K * H]
    positions: Tensor,  # [n] int64
    *,
    fc_weight: Tensor,  # [H, K * H]
    norm_weight: Tensor,  # [H]
    kv_weights: Sequence[Tensor],  # per layer [2 * kv_heads * d, H], keys then values
    k_norm_weights: Sequence[Tensor],  # per layer [d]
    cos_sin: Tensor,  # [max positions, d], cosines then sines
    eps: float,
) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's draft keys and values of target tokens, [n, kv_heads, d] each.

    One projection and norm shared by all layers, then each layer's K and V, k-norm and RoPE.
    """
    hidden = rms_norm(features.to(fc_weight.dtype) @ fc_weight.T, norm_weight, eps)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    pairs = []
    for kv_weight, k_norm_weight in zip(kv_weights, k_norm_weights, strict=True):
        projected = (hidden @ kv_weight.T).unflatten(-1, (2, -1, k_norm_weight.shape[0]))
        keys, values = projected.unbind(dim=1)
        pairs.append((rotate(rms_norm(keys, k_norm_weight, eps), cos, sin), values))
    return pairs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in fp32, then scale by a plain weight."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply neox RoPE to [..., d] with cosines and sines [..., d / 2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float(), sin.float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
