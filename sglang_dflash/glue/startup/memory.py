"""KV memory that SGLang's own sizing does not account for under DFLASH."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.glue import changes, compat, seams
from sglang_dflash.glue.startup.server_args import read_drafter


def row_headroom(original: Any, *given: Any) -> int:
    """Widen each request's row of the slot table to hold the two blocks a step reserves.

    SGLang leaves room for one block at page size 1; for a request near the context length the
    second would overflow into the next request's row. `given` are the server arguments, in releases
    that pass them.
    """
    headroom = original(*given)
    settings = seams.settings(*given)
    if settings.speculative_algorithm != "DFLASH":
        return headroom
    reserve = compat.alloc_reserve_per_decode(*given)
    return max(headroom, reserve + settings.page_size)


def budget_draft_kv(original: Any, configurator: Any, kvc: Any) -> None:
    """Include the drafter's exact KV bytes in the memory cost of a token.

    SGLang scales the target's cost by the number of layers, as if both models' layers were alike,
    and omits the drafter altogether for targets with sliding-window layers.
    """
    if not kvc.spec_algorithm.is_dflash() or kvc.is_draft_worker:
        return original(configurator, kvc)
    original(configurator, _WithoutSpeculation(kvc))
    changes.replace(
        configurator,
        "_cell_size",
        configurator._cell_size + draft_kv_bytes(kvc),
        why="each token also needs draft KV",
    )
    return None


def budget_whole_drafter(original: Any, *, tp_size: int, **drafter: Any) -> int:
    """Budget the draft KV that each rank has: all of it, if the ranks cannot share the drafter.
    For releases that include the drafter in the memory cost of a token."""
    settings = seams.settings()
    if settings.speculative_algorithm == "DFLASH":
        tp_size = read_drafter(settings).shards(tp_size)
    return original(tp_size=tp_size, **drafter)


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
    """A view of a configurator's input with speculation turned off."""

    def __init__(self, kvc: Any) -> None:
        self._kvc = kvc
        self.spec_algorithm = compat.SpeculativeAlgorithm.NONE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kvc, name)
