"""Attention in torch. `paged_attention` runs on a CPU; the other two are specifications only: they
read lengths on the host, which CUDA graphs do not allow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.kernels.logits.reference import capped


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
    sinks: Tensor | None = None,  # [heads] a logit each, added to the softmax denominator
) -> Tensor:
    """Attend over keys gathered by slot; return [b, q, heads, dv].

    Columns that are masked for every query read the request's last key instead of their own slot,
    so that the contents of a freed or foreign slot, NaN included, never enter the arithmetic.
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
    if logit_cap > 0 or sinks is not None:
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = capped(query @ keys.transpose(-1, -2) * scale, logit_cap)
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        return (_softmax(scores, sinks).to(values) @ values).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=group > 1
    )
    return out.transpose(1, 2)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of scores [..., heads, q, keys]; a sink takes a share that is dropped."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]


def verify_attention(
    query: Tensor,  # [R, heads, d]
    block_keys: Tensor,  # [R, kv_heads, d]
    block_values: Tensor,  # [R, kv_heads, dv]
    out: Tensor,  # [R, heads, dv], written
    key_cache: Tensor,  # [slots, kv_heads, d]
    value_cache: Tensor,  # [slots, kv_heads, dv]
    row_indptr: Tensor,  # [n + 1] int, rows of each request
    kv_indptr: Tensor,  # [n + 1] int
    kv_indices: Tensor,  # [keys] int, slots of the prefixes
    *,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    window_left: int = -1,  # keys a row sees to its left, -1 for all
    logit_cap: float = 0.0,
    slots: Tensor | None = None,  # [R] int, slots to also write the block's KV to
    sinks: Tensor | None = None,  # [heads] a logit each, added to the softmax denominator
) -> None:
    """Attend from each request's rows over its prefix and, causally, over these rows themselves.

    The scales dequantise the caches; the block's own keys and values are not scaled. Rows after the
    last request's are padding: zeros are written for them, and nothing to their slots.
    """
    bounds, row_bounds = kv_indptr.tolist(), row_indptr.tolist()
    if slots is not None:
        used = row_bounds[-1]
        key_cache[slots[:used]] = block_keys[:used]
        value_cache[slots[:used]] = block_values[:used]
    out[row_bounds[-1] :] = 0
    group = query.shape[1] // block_keys.shape[1]
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        block = slice(row_bounds[i], row_bounds[i + 1])
        prefix = kv_indices[first:last].long()
        keys = torch.cat([key_cache[prefix].float() * key_scale, block_keys[block].float()])
        values = torch.cat([value_cache[prefix].float() * value_scale, block_values[block].float()])
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[block].float(), keys) * scale
        scores = capped(scores, logit_cap)
        position = torch.arange(len(keys), device=query.device)
        distance = position[last - first :, None] - position
        hidden = distance < 0
        if window_left >= 0:
            hidden |= distance > window_left
        weights = _softmax(scores.masked_fill(hidden, float("-inf")), sinks)
        out[block] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def index_prefixes(
    slot_table: Tensor,  # [rows, width] int
    request_rows: Tensor,  # [n] int
    lens: Tensor,  # [n] int, keys per prefix
    kv_indptr: Tensor,  # [n + 1] int, written
    kv_indices: Tensor,  # [at least all keys] int, written
    *,
    window: int = -1,  # number of last slots to keep of each prefix, -1 for all
    starts: Tensor | None = None,  # [n] int, written: position of the first kept slot
    slot_map: Tensor | None = None,  # [slots] int, applied to every slot
) -> None:
    """Concatenate the slots of all prefixes, as the verify kernel reads them."""
    found = [torch.zeros(0, dtype=torch.int64, device=lens.device)]
    for i, (row, length) in enumerate(zip(request_rows.tolist(), lens.tolist(), strict=True)):
        first = max(0, length - window) if window >= 0 else 0
        slots = slot_table[row, first:length].long()
        found.append(slots if slot_map is None else slot_map[slots].long())
        if starts is not None:
            starts[i] = first
    ends = torch.tensor([len(x) for x in found]).cumsum(0)
    kv_indptr[: len(found)] = ends.to(kv_indptr)
    kv_indices[: ends[-1]] = torch.cat(found).to(kv_indices)
