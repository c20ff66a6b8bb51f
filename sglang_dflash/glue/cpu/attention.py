"""A CPU attention backend, on the kernels' torch reference.

Supports prefill, decode and blocks (verify and draft), with full and sliding-window KV pools.
SGLang's own torch backend has no blocks, and reads sliding-window pools with the wrong slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.glue import compat
from sglang_dflash.kernels.attention import reference


class Rows(NamedTuple):
    """Requests with the same number of queries, attended together."""

    tokens: slice  # their rows in the flat query
    positions: Tensor  # [b, q] int64
    kv_lens: Tensor  # [b] int64
    slots: Tensor  # [b, width] slots of the full pool
    swa_slots: Tensor | None  # the same in the sliding-window pool


class CpuAttention(compat.AttentionBackend):
    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._has_swa = isinstance(self.token_to_kv_pool, compat.SWAKVPool)
        self._rows: list[Rows] = []
        self._swa_out: Tensor | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Compute once per forward which keys each query reads."""
        mode = forward_batch.forward_mode
        lens = forward_batch.seq_lens.long()
        table = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        if mode.is_target_verify():
            rows = forward_batch.spec_info.ragged_verify_layout
            if rows is None or rows.bounds is None:
                width = forward_batch.spec_info.draft_token_num
                self._rows = [self._uniform(lens, lens + width, width, table)]
            else:
                counts = rows.bounds.diff()
                self._rows = self._ragged(counts, lens, lens + counts, table)
        elif mode.is_decode():
            self._rows = [self._uniform(lens - 1, lens, 1, table)]
        else:
            starts = forward_batch.extend_prefix_lens.long()
            self._rows = self._ragged(forward_batch.extend_seq_lens, starts, lens, table)
        if self._has_swa:
            self._swa_out = self.token_to_kv_pool.translate_loc_from_full_to_swa(
                forward_batch.out_cache_loc
            )

    def _uniform(
        self, starts: Tensor, kv_lens: Tensor, num_queries: int, table: Tensor, offset: int = 0
    ) -> Rows:
        slots = table[:, : int(kv_lens.max())].long()
        return Rows(
            tokens=slice(offset, offset + num_queries * len(starts)),
            positions=starts[:, None] + torch.arange(num_queries),
            kv_lens=kv_lens,
            slots=slots,
            swa_slots=(
                self.token_to_kv_pool.translate_loc_from_full_to_swa(slots).long()
                if self._has_swa
                else None
            ),
        )

    def _ragged(self, counts: Tensor, starts: Tensor, kv_lens: Tensor, table: Tensor) -> list[Rows]:
        rows, offset = [], 0
        for i, num_queries in enumerate(counts.tolist()):
            one = slice(i, i + 1)
            rows.append(self._uniform(starts[one], kv_lens[one], num_queries, table[one], offset))
            offset += num_queries
        return rows

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **_unused: Any,
    ) -> Tensor:
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            where = forward_batch.out_cache_loc
            pool.set_kv_buffer(layer, compat.KVWriteLoc(where, self._swa_out), k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        if is_expanded := (layer.tp_k_head_num, layer.qk_head_dim) != keys.shape[1:]:
            # MLA without a prefix: the pool has latents, and these keys are all there are
            assert k is not None and v is not None
            keys, values = (x.view(len(x), layer.tp_k_head_num, -1) for x in (k, v))
        in_swa = self._has_swa and pool.layers_mapping[layer.layer_id][1]
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for rows in self._rows:
            slots = rows.swa_slots if in_swa and rows.swa_slots is not None else rows.slots
            if is_expanded:
                slots = torch.arange(rows.tokens.start, rows.tokens.stop)[None]
            out[rows.tokens] = reference.paged_attention(
                query[rows.tokens].unflatten(0, rows.positions.shape),
                keys,
                values,
                slots,
                rows.kv_lens,
                rows.positions,
                scale=layer.scaling,
                causal=layer.attn_type != compat.AttentionType.ENCODER_ONLY,
                window_left=-1 if layer.sliding_window_size is None else layer.sliding_window_size,
                logit_cap=layer.logit_cap,
                sinks=sinks,
            ).flatten(0, 1)
        return out.flatten(1)

    forward_extend = _attend
    forward_decode = _attend

    def support_triton(self) -> bool:
        return False
