"""KV room that SGLang's own sizing forgets when DFLASH runs."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.startup.server_args import read_drafter


def row_headroom(original: Any, server_args: Any) -> int:
    """Widen each request's row of the slot table to hold the two blocks a step reserves.

    SGLang leaves room for one block at page size 1; the second would run over into the next
    request's row for a request that nears the context length.
    """
    headroom = original(server_args)
    if server_args.speculative_algorithm != "DFLASH":
        return headroom
    reserve = compat.alloc_reserve_per_decode(server_args)
    return max(headroom, reserve + server_args.page_size)


def budget_draft_kv(original: Any, configurator: Any, kvc: Any) -> None:
    """Count the drafter's KV, byte for byte, in what a token costs.

    SGLang scales the target's cost by the number of layers, as if both models' layers were alike,
    and leaves the drafter out altogether for targets with sliding-window layers.
    """
    if not kvc.spec_algorithm.is_dflash() or kvc.is_draft_worker:
        return original(configurator, kvc)
    original(configurator, _WithoutSpeculation(kvc))
    changes.replace(
        configurator,
        "_cell_size",
        configurator._cell_size + draft_kv_bytes(kvc),
        why="a token costs its draft KV, too",
    )
    return None


def draft_kv_bytes(kvc: Any) -> int:
    """Return the bytes of draft KV per token on this rank."""
    server_args = kvc.server_args
    dtype = kvc.kv_cache_dtype
    if server_args.speculative_draft_attention_backend == "fa4" and dtype.itemsize == 1:
        # fa4 cannot read an fp8 cache: the draft pool keeps the model's dtype
        dtype = kvc.model_dtype
    return read_drafter(server_args).kv_bytes_per_token(
        element_size=torch.empty(0, dtype=dtype).element_size(),
        tp_size=compat.get_parallel().attn_tp_size,
    )


class _WithoutSpeculation:
    """A configurator's input that says nothing of the drafter."""

    def __init__(self, kvc: Any) -> None:
        self._kvc = kvc
        self.spec_algorithm = compat.SpeculativeAlgorithm.NONE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kvc, name)
