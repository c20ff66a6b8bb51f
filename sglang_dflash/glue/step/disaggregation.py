"""Prefill and decode on different servers (PD), as far as SGLang does not do it by itself.

The draft KV travels with the target's: it has the same slots, and SGLang sends the buffers of both
pools. On a GPU it is complete before it is sent: a prefill writes it on the stream of the target's
forward pass, in the same call. SGLang sends a chunk once it has waited for that pass's result, and
a cached prefix once it has waited for an event; both are queued on that stream later.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.glue import compat
from sglang_dflash.glue.step.spec_input import DFlashState


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
