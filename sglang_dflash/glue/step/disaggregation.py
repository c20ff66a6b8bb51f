"""Prefill and decode on different servers (PD), as far as SGLang does not do it by itself.

The draft KV travels with the target's: it has the same slots, and SGLang sends the buffers of both
pools. On a GPU it is complete before it is sent: a prefill writes it on the stream of the target's
forward pass, in the same call. SGLang sends a chunk once it has waited for that pass's result, and
a cached prefix once it has waited for an event; both are queued on that stream later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from sglang_dflash.glue import compat, seams
from sglang_dflash.glue.step.spec_input import DFlashState


@dataclass(frozen=True)
class DraftKV:
    """What the hooks know of this process's draft KV."""

    pool: Any
    target_kv_heads: int  # on all ranks together
    shards: Callable[[int], int]  # by number of ranks: over how many the draft KV is divided


_draft_kv: list[DraftKV] = []
# retracted request -> its draft KV, in SGLang's format
_backups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def transfer(pool: Any, *, target_kv_heads: int, shards: Callable[[int], int]) -> None:
    """Let the hooks serve this draft KV."""
    _draft_kv[:] = [DraftKV(pool, target_kv_heads, shards)]


def begin_decoding(original: Any, algorithm: Any, batch: Any, *given: Any) -> Any:
    """Return the state from which requests start to decode whose KV has just arrived.

    Their anchors are their last tokens, as after a prefill here. State on the device is left to the
    first step, which runs on the stream that later ones read it on.
    """
    if not algorithm.is_dflash():
        return original(algorithm, batch, *given)
    # some releases pass the server arguments before these
    *_, last_tokens, future_map = given
    rows = None
    if batch.enable_overlap:
        rows = batch.req_pool_indices
        future_map.publish(rows, batch.seq_lens)
        future_map.stash(rows, compat.RelayPayload(bonus_tokens=last_tokens))
    return DFlashState(last_tokens, batch.seq_lens, future_indices=rows, arrived=batch.reqs)


def back_up(original: Any, req: Any, req_to_token_pool: Any, allocator: Any) -> None:
    """Copy the KV of a request that a decode server retracts to the host, with its draft KV: the
    request continues from the copy, not from another prefill."""
    original(req, req_to_token_pool, allocator)
    for kv in _draft_kv:
        _backups[req] = kv.pool.get_cpu_copy(_slots_of(req, req_to_token_pool))


def restore(original: Any, req: Any, req_to_token_pool: Any, allocator: Any) -> None:
    """Copy the KV of a retracted request back, with its draft KV."""
    original(req, req_to_token_pool, allocator)
    for kv in _draft_kv:
        kv.pool.load_cpu_copy(_backups.pop(req), _slots_of(req, req_to_token_pool))


def _slots_of(req: Any, req_to_token_pool: Any) -> Tensor:
    # the last token has no KV yet
    return req_to_token_pool.req_to_token[seams.row_of(req), : req.seqlen - 1]


def match_ranks(original: Any, kv_manager: Any, prefill: Any) -> None:
    """Match this decode server's ranks with those of a prefill server; refuse it if their shards of
    the draft KV differ in a way that SGLang cannot transfer."""
    original(kv_manager, prefill)
    sizes = (prefill.attn_tp_size, kv_manager.attn_tp_size)
    for kv in _draft_kv:
        reason = why_not_resliced(
            sizes,
            item_lens=kv_manager.kv_args.kv_item_lens,
            target_kv_heads=kv.target_kv_heads,
            shards=kv.shards,
            is_mla=kv_manager.is_mla_backend,
        )
        if reason is not None:
            raise RuntimeError(
                f"The prefill server has --tp-size {sizes[0]} and this decode server {sizes[1]}, "
                f"but SGLang cannot redistribute draft KV: {reason}. Start both with the same size."
            )


def why_not_resliced(
    sizes: tuple[int, int],
    *,
    item_lens: Sequence[int],
    target_kv_heads: int,
    shards: Callable[[int], int],
    is_mla: bool,
) -> str | None:
    """Return why the KV of one number of ranks cannot be sent to another; None if it can be.

    SGLang cuts every buffer alike, at the target's heads. That suits the drafter's if both models'
    heads are divided among the ranks and their tokens take the same number of bytes.
    """
    if sizes[0] == sizes[1]:
        return None
    if is_mla:
        return "every rank has all of the target's (MLA), but a part of the drafter's"
    if any(shards(size) != size for size in sizes):
        return "on one side every rank has all of it, because the ranks cannot share the drafter"
    if len(set(item_lens)) > 1:
        return f"it cuts all layers alike, and theirs differ in bytes ({sorted(set(item_lens))})"
    if any(target_kv_heads % size for size in sizes):
        return f"the target has {target_kv_heads} KV heads, which some of its ranks share"
    return None
