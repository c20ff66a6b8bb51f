"""Torch twins of every op: the specification, and the path that runs on a CPU.

No op of a step reads a tensor's value on the host, so each is safe under CUDA-graph capture and
costs no synchronisation. `verify_attention` and `index_prefixes` do: they are specifications only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# slot 0 of every KV pool is scratch: what must not be kept is written there
SCRATCH_SLOT = 0
# a request's `num_correct` that leaves the count to `accept_block`
COUNT_MATCHES = -1


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


def accept_block(
    token_ids: Tensor,  # [b, B] int64, anchor then drafts
    choices: Tensor,  # [b, B] int64, the target's token after each row
    lens: Tensor,  # [b] int64
    slots: Tensor,  # [b, B] int64
    num_correct: Tensor | None = None,  # [b] int32, overrides the leading-match count
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (commit lens [b] int32, committed tokens [b, B] padded with 0, bonus [b], new lens
    [b], slots [b, B] with every row past the commit redirected to the scratch slot).

    Draft k + 1 is correct when it equals the choice after row k and every draft before it is. The
    choice after the correct drafts is the bonus. A request whose `num_correct` is COUNT_MATCHES,
    or every request if there is none, has its leading matches counted.
    """
    matches = token_ids[:, 1:] == choices[:, :-1]
    leading = matches.to(torch.int32).cumprod(dim=1, dtype=torch.int32).sum(dim=1)
    if num_correct is None:
        num_correct = leading
    else:
        num_correct = torch.where(num_correct < 0, leading, num_correct)
    count = num_correct[:, None].long()
    bonus = choices.gather(1, count)
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    drafts = torch.where(columns < count, torch.roll(token_ids, -1, dims=1), 0)
    committed = torch.where(columns == count, bonus, drafts)
    kept = torch.where(columns <= count, slots, SCRATCH_SLOT)
    commit_lens = num_correct.to(torch.int32) + 1
    return commit_lens, committed, bonus.squeeze(1), lens + commit_lens, kept


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
    keys, values = (
        # index_select copies whole rows: on a CPU four times as fast as indexing
        cache.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if logit_cap > 0:
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = logit_cap * torch.tanh(query @ keys.transpose(-1, -2) * (scale / logit_cap))
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        return (torch.softmax(scores, dim=-1) @ values).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=group > 1
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
    slots: Tensor | None = None,  # [n * B] int, where the block's keys and values are written too
) -> None:
    """Attend from each block over its request's prefix and, causally, over the block itself.

    The scales undo the quantisation of the caches; the block's own keys and values need none.
    """
    if slots is not None:
        key_cache[slots] = block_keys
        value_cache[slots] = block_values
    bounds = kv_indptr.tolist()
    rows = query.shape[0] // (len(bounds) - 1)
    group = query.shape[1] // block_keys.shape[1]
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        block = slice(i * rows, (i + 1) * rows)
        prefix = kv_indices[first:last].long()
        keys = torch.cat([key_cache[prefix].float() * key_scale, block_keys[block].float()])
        values = torch.cat([value_cache[prefix].float() * value_scale, block_values[block].float()])
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


def context_hidden(
    features: Tensor,  # [n, K * H]
    *,
    fc_weight: Tensor,  # [H, K * H]
    norm_weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """Return the projected, normed features [n, H] that every layer makes its draft KV from."""
    return rms_norm(features.to(fc_weight.dtype) @ fc_weight.T, norm_weight, eps)


def write_context(
    projected: Tensor,  # [L, n, 2 * kv_heads * d], keys then values of each layer
    positions: Tensor,  # [n] int64
    slots: Tensor,  # [n] int64; the scratch slot where a row is not kept
    key_caches: Sequence[Tensor],  # L of [slots, kv_heads, d], written
    value_caches: Sequence[Tensor],  # L of [slots, kv_heads, d], written
    *,
    k_norm_weights: Sequence[Tensor],  # L of [d]
    cos_sin: Tensor,  # [max positions, d], cosines then sines
    eps: float,
) -> None:
    """Norm and rotate the keys, and write keys and values at their slots."""
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    layers = zip(projected, key_caches, value_caches, k_norm_weights, strict=True)
    for rows, key_cache, value_cache, weight in layers:
        keys, values = rows.unflatten(-1, (2, *key_cache.shape[1:])).unbind(dim=1)
        key_cache[slots] = rotate(rms_norm(keys, weight, eps), cos, sin).to(key_cache.dtype)
        value_cache[slots] = values.to(value_cache.dtype)


def thin_linear(
    x: Tensor,  # [n, K]
    weight: Tensor,  # [N, K]
) -> Tensor:
    """Return the product as one part [1, n, N] in x's type; a kernel may give several, in fp32."""
    return torch.matmul(x, weight.T)[None]


def norm_and_turn(
    qkv: Tensor,  # [n, (q_heads + 2 * kv_heads) * d], overwritten
    positions: Tensor,  # [n] int64
    *,
    q_weight: Tensor,  # [d]
    k_weight: Tensor,  # [d]
    cos_sin: Tensor,  # [positions, d], cosines then sines
    q_heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    """Norm every head of q and k with its weight and of v without one; turn q and k."""
    heads = qkv.unflatten(-1, (q_heads + 2 * kv_heads, -1))
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    q.copy_(rotate(rms_norm(q, q_weight, eps), cos, sin))
    k.copy_(rotate(rms_norm(k, k_weight, eps), cos, sin))
    v.copy_(rms_norm(v, torch.ones_like(k_weight), eps))


def norm_add_norm(
    parts: Tensor,  # [S, n, H]
    residual: Tensor,  # [n, H]
    *,
    norm_weight: Tensor,  # [H]
    next_weights: Sequence[Tensor],  # K of [H]
    scale: Tensor | None,  # [1]
    eps: float,
    beside: tuple[Tensor, Tensor, Tensor] | None = None,  # [n, H], [H], [H]
) -> tuple[Tensor, Tensor]:
    """Return (new residual [n, H], the same normed by each weight [K, n, H]) in residual's type.

    The new residual is (norm(sum of parts) + residual) * scale. `beside` is another branch, a
    weight for the sum and a weight for it: both are normed by these and added before.
    """
    x = parts.float().sum(0).to(residual.dtype).float()
    if beside is not None:
        branch, first_weight, beside_weight = beside
        x = rms_norm(x, first_weight, eps) + rms_norm(branch.float(), beside_weight, eps)
    x = rms_norm(x, norm_weight, eps) + residual.float()
    out = (x if scale is None else x * scale.float()).to(residual.dtype)
    if not next_weights:
        return out, out.new_empty(0, *out.shape)
    return out, torch.stack([rms_norm(out, weight, eps) for weight in next_weights])


def index_prefixes(
    slot_table: Tensor,  # [rows, width] int
    rows: Tensor,  # [n] int
    lens: Tensor,  # [n] int, keys per prefix
    kv_indptr: Tensor,  # [n + 1] int, written
    kv_indices: Tensor,  # [at least all keys] int, written
    *,
    window: int = -1,  # keep the last so many slots of each prefix, -1 for all
    starts: Tensor | None = None,  # [n] int, written: position of the first kept slot
    slot_map: Tensor | None = None,  # [slots] int, applied to every slot
) -> None:
    """Lay the slots of all prefixes end to end, as the verify kernel reads them."""
    found = [torch.zeros(0, dtype=torch.int64, device=lens.device)]
    for i, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        first = max(0, length - window) if window >= 0 else 0
        slots = slot_table[row, first:length].long()
        found.append(slots if slot_map is None else slot_map[slots].long())
        if starts is not None:
            starts[i] = first
    ends = torch.tensor([len(x) for x in found]).cumsum(0)
    kv_indptr[: len(found)] = ends.to(kv_indptr)
    kv_indices[: ends[-1]] = torch.cat(found).to(kv_indices)


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
