"""Our verify attention in the target's Triton backend, and in-graph planning for the drafter's.

Three methods of the backend are replaced on the instance. Two of them for verify blocks only: the
indexing of prefixes before a graph runs (SGLang's reads a length on the host, which stalls every
step of a model with sliding windows) and a layer's attention. The third sizes the graphs' buffers.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue import changes, compat, seams
from sglang_dflash.kernels import Ops

logger = logging.getLogger(__name__)

OURS = "sglang_dflash.verify_attention"
# keys of an index that is small beside a model: 64 MiB
SMALL_INDEX = 1 << 23


def install_verify_attention(
    runner: Any, ops: Ops, *, max_requests: int, block_size: int, full_blocks: bool
) -> str:
    """Use our kernel for the target's verify blocks; call before graph capture. Return what runs.

    If all blocks are full, it has no launch of its own for requests of few rows.

    Other backends keep their own kernel. So does the Triton backend in a mode, or with a layer,
    that ours does not support; the reason is logged and returned.
    """
    backend = whole = runner.attn_backend
    if isinstance(whole, compat.HybridLinearAttnBackend):
        # the other part is for the layers with linear attention
        backend = whole.full_attn_backend
    if not isinstance(backend, compat.TritonAttnBackend) or ops.verify_attention is None:
        return type(backend).__name__
    shapes = _layer_shapes(runner.model)
    foreign = _foreign_mode(backend) or _foreign_layers(shapes, runner.dtype)
    if foreign is not None:
        logger.warning("DFLASH: SGLang's prefill kernel runs verify attention: %s.", foreign)
        return f"{type(backend).__name__}: {foreign}"
    attention = ops.verify_attention(
        max_requests,
        block_size,
        shapes=shapes,
        dtype=runner.dtype,
        device=runner.device,
        narrow_tiles={} if full_blocks else None,
    )
    VerifyBackend(backend, ops, attention).install(block_size)
    return OURS


def describe_verify_attention(serves: str, ops: Ops) -> dict[str, str]:
    """Return what runs the verify attention ops, given the kernel in use; empty if it is ours."""
    if serves == OURS:
        return {}
    # on a CPU the backend is ours, too, and runs the torch reference `paged_attention`
    kept = f"torch ({serves})" if ops.verify_attention is None else f"sglang ({serves})"
    return {"verify_attention": kept, "index_prefixes": kept}


def _foreign_mode(backend: Any) -> str | None:
    if backend.enable_deterministic:
        return "deterministic inference needs its own kernel"
    if backend.dcp_size > 1:
        return "decode context parallelism shards the KV cache"
    if backend.use_mla:
        return "with MLA the values are a part of the keys"
    if seams.has_own_slot_numbers(backend):
        return "the unified memory pool has its own slot numbering"
    return None


def _layer_shapes(model: torch.nn.Module) -> list[Any]:
    from sglang_dflash.kernels.attention.tiles import LayerShape

    shapes = {
        LayerShape(m.tp_q_head_num, m.tp_k_head_num, m.qk_head_dim, m.v_head_dim)
        for m in model.modules()
        if isinstance(m, compat.RadixAttention)
    }
    return sorted(shapes, key=str)


def _foreign_layers(shapes: list[Any], dtype: torch.dtype) -> str | None:
    from sglang_dflash.kernels import cards
    from sglang_dflash.kernels.attention.tiles import can_serve, choose_tiles

    card = cards.current()
    tiles = choose_tiles(card, dtype).wide
    foreign = [
        f"{s.num_q_heads} query heads of dim {s.head_dim} over {s.num_kv_heads} KV heads"
        for s in shapes
        if not can_serve(s, tiles)
    ]
    if not foreign:
        return None
    return (
        f"on this card ({card}) our kernel supports head dims up to {max(tiles)} and KV heads that "
        f"divide the query heads, but this model has layers of {', '.join(foreign)}"
    )


def shrink_graph_buffers(backend: Any, block_size: int) -> None:
    """Size a Triton backend's index of the prefixes by full blocks.

    SGLang sizes it for a decode step, where every token has its own context. In a verify pass the
    tokens of a block share one: at a context of 262,144 tokens and 32 blocks that is 64 MiB instead
    of a gigabyte. More requests than blocks fit if their contexts are shorter, or `SMALL_INDEX`
    holds them all.
    """
    original = backend.init_cuda_graph_state

    def init_cuda_graph_state(max_bs: int, max_num_tokens: int) -> None:
        original(max_bs, max_num_tokens // block_size)
        keys = min(max_bs * backend.max_context_len, SMALL_INDEX)
        if keys > backend.cuda_graph_kv_indices.shape[0]:
            changes.replace(
                backend,
                "cuda_graph_kv_indices",
                torch.zeros(keys, dtype=torch.int64, device=backend.device),
                why="more requests than full blocks may run, each with a context",
            )
        changes.replace(backend, "_verify_mask", None, why="chain drafts need no mask")
        window = backend.sliding_window_size
        if window is not None and window > 0:
            changes.replace(
                backend,
                "cuda_graph_window_kv_indices",
                torch.zeros(max_bs * window, dtype=torch.int64, device=backend.device),
                why="more requests than full blocks may run, each with a window of keys",
            )
        if backend.use_sliding_window_kv_pool:
            changes.replace(
                backend,
                "cuda_graph_swa_out_cache_loc",
                torch.zeros(max_num_tokens, dtype=torch.int64, device=backend.device),
                why="a block writes one slot per token",
            )

    changes.replace(
        backend,
        "init_cuda_graph_state",
        init_cuda_graph_state,
        why="index buffers are sized by blocks: the tokens of a block share a context",
    )


def plan_in_graph(draft_backend: Any) -> None:
    """Capture a FlashAttention backend's pre-replay planning into the draft graph itself.

    Lengths and page table take half a dozen launches, which read only the graph's own inputs and
    the slot table. The target's graphs must not do this: once one has started, the scheduler may
    write the slot table.
    """
    plan = draft_backend.init_forward_metadata_out_graph

    def before_graph(forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            plan(forward_batch, in_capture=True)

    why = "attention planning is captured in the draft graph, at no cost to the host"
    changes.replace(draft_backend, "init_forward_metadata_out_graph", before_graph, why=why)
    changes.replace(draft_backend, "init_forward_metadata_in_graph", plan, why=why)


class VerifyBackend:
    """The verify half of one Triton backend."""

    def __init__(self, backend: Any, ops: Ops, attention: Any) -> None:
        self._backend = backend
        self._attention = attention
        self._index_prefixes = ops.index_prefixes
        self._run_layer = backend.forward_extend
        self._warned = False
        self._numbers = torch.arange(backend.qo_indptr.shape[0], device=backend.device)

    def install(self, block_size: int) -> None:
        self._window_slots()
        shrink_graph_buffers(self._backend, block_size)
        changes.replace(
            self._backend,
            "forward_extend",
            self.forward_extend,
            why="our kernel runs verify attention",
        )
        changes.replace(
            self._backend,
            "_update_target_verify_buffers",
            seams.as_buffer_filler(self.lay_out_prefixes),
            why="builds the prefix index without reading lengths back to the host",
        )

    def lay_out_prefixes(
        self, bs: int, seq_lens: Tensor, request_rows: Tensor, spec_info: Any
    ) -> None:
        """Fill a graph's batch index buffers, without reading a length back from the device."""
        backend = self._backend
        self._bound_rows(backend.qo_indptr[: bs + 1], spec_info)
        batch = (backend.req_to_token, request_rows[:bs], seq_lens[:bs])
        self._index_prefixes(*batch, backend.kv_indptr, backend.cuda_graph_kv_indices)
        if backend.sliding_window_size is not None and backend.sliding_window_size > 0:
            self._index_prefixes(
                *batch,
                backend.window_kv_indptr,
                backend.cuda_graph_window_kv_indices,
                window=backend.sliding_window_size,
                starts=backend.cuda_graph_window_kv_offsets,
                slot_map=self._window_slots(),
            )

    def _bound_rows(self, bounds: Tensor, spec_info: Any) -> None:
        """Set where each request's rows begin; those that only pad the graph have none."""
        rows = spec_info.ragged_verify_layout
        if rows is not None and rows.bounds is not None:
            bounds[: rows.requests + 1].copy_(rows.bounds)
            bounds[rows.requests + 1 :].fill_(rows.used)
            return
        torch.mul(self._numbers[: bounds.shape[0]], spec_info.draft_token_num, out=bounds)
        if rows is not None:
            bounds.clamp_(max=rows.used)

    def _window_slots(self) -> Tensor | None:
        """Return the map from full-pool slots to those of the sliding-window pool; None if all
        layers share one pool, and a token has one slot."""
        if not self._backend.use_sliding_window_kv_pool:
            return None
        slots = self._backend.token_to_kv_pool.full_to_swa_index_mapping
        if slots is None:
            raise RuntimeError(
                "The pool of the sliding-window layers has no full_to_swa_index_mapping, so their "
                "slots are unknown. Start with another --attention-backend, which keeps its own "
                "kernel, and report this."
            )
        return slots

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unusual: Any,
    ) -> Tensor:
        """Run one layer: our kernel for verify blocks, SGLang's for anything else."""
        ours = forward_batch.forward_mode.is_target_verify()
        if ours and not self._knows(q, k, v, layer, sinks, unusual):
            ours = False
            self._warn(q, layer)
        if not ours:
            # SGLang's backend knows them all; a layer without sinks passes none
            given = unusual if sinks is None else {**unusual, "sinks": sinks}
            return self._run_layer(q, k, v, layer, forward_batch, save_kv_cache, **given)
        assert k is not None and v is not None
        return self._verify(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def _verify(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend, and write the block's KV unless the layer has written it along with RoPE, as
        SGLang's Qwen3 MoE does into a bf16 pool."""
        backend = self._backend
        metadata = backend.forward_metadata
        caches = self._caches(layer)
        windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        slots = forward_batch.out_cache_loc
        if windowed and metadata.swa_out_cache_loc is not None:
            slots = metadata.swa_out_cache_loc
        if not save_kv_cache:
            slots = None
        elif caches[0].dtype != k.dtype:
            # a quantised KV cache: SGLang scales and casts
            where = compat.KVWriteLoc(forward_batch.out_cache_loc, metadata.swa_out_cache_loc)
            scales = (layer.k_scale, layer.v_scale) if layer.k_scale is not None else ()
            # SGLang scales in place
            backend.token_to_kv_pool.set_kv_buffer(layer, where, k.clone(), v.clone(), *scales)
            slots = None
        if layer.qk_head_dim == layer.v_head_dim:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        quantised = layer.k_scale is not None and layer.v_scale is not None
        requests = forward_batch.batch_size
        bounds = metadata.window_kv_indptr if windowed else metadata.kv_indptr
        self._attention.run(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k,
            v,
            out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            *caches,
            metadata.qo_indptr[: requests + 1],
            bounds[: requests + 1],
            metadata.window_kv_indices if windowed else metadata.kv_indices,
            scale=float(layer.scaling),
            key_scale=layer.k_scale_float if quantised else 1.0,
            value_scale=layer.v_scale_float if quantised else 1.0,
            window_left=layer.sliding_window_size if windowed else -1,
            logit_cap=compat.logit_capping_mod(layer.logit_capping_method, layer.logit_cap),
            slots=slots,
            sinks=sinks,
        )
        return out

    def _caches(self, layer: Any) -> tuple[Tensor, Tensor]:
        pool = self._backend.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def _knows(
        self, q: Tensor, k: Any, v: Any, layer: Any, sinks: Tensor | None, unusual: dict[str, Any]
    ) -> bool:
        return (
            k is not None
            and v is not None
            and (sinks is None or sinks.shape == (layer.tp_q_head_num,))
            and not any(value is not None for value in unusual.values())
            and not layer.is_cross_attention
            and self._is_causal(layer)
            and layer.xai_temperature_len <= 0
            and self._attention.fits(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), k, v, *self._caches(layer)
            )
        )

    def _is_causal(self, layer: Any) -> bool:
        kind = compat.AttentionType
        if layer.attn_type == kind.DECODER_BIDIRECTIONAL:
            return not self._backend.allow_bidirectional_attention_in_extend
        return layer.attn_type == kind.DECODER

    def _warn(self, q: Tensor, layer: Any) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "DFLASH: SGLang's prefill kernel runs verify attention in layer %d (query %s, "
                "%s): slower, same result.",
                layer.layer_id,
                tuple(q.shape),
                q.dtype,
            )
