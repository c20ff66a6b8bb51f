"""SGLang 0.5.17."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import Any

from torch import Tensor

from sglang_dflash.glue import compat

# free a request's out-of-window KV from this many tokens on: freeing costs host time
FREE_AT_LEAST = 128


# server arguments


def settings(server_args: Any = None) -> Any:
    """Return the values in effect of server arguments; without any, of this process's own."""
    return compat.get_server_args() if server_args is None else server_args


def decide(server_args: Any, **values: Any) -> None:
    """Set server arguments; only for `changes.Settings`."""
    for name, value in values.items():
        setattr(server_args, name, value)


def model_config(server_args: Any) -> Any:
    """Return the target's config."""
    return server_args.get_model_config()


def asks_for_quantised_drafter(server_args: Any) -> bool:
    """Return whether the drafter's quantisation, which is not None, was asked for."""
    # SGLang's default is the target's, and looks like a request for it
    return bool(server_args.speculative_draft_model_quantization != server_args.quantization)


def draft_kv_dtype(server_args: Any) -> str | None:
    """Return the type of KV that was asked for the drafter alone: it cannot be."""
    return None


def also_refused(server_args: Any) -> dict[str, bool]:
    """Return what this release offers beyond the others and DFLASH does not support: what a refusal
    calls it, and whether it was asked for."""
    return {}


def backends_for_model_checks(server_args: Any) -> tuple[Any, str]:
    """Return where the checks of a model's arguments find the attention backends: the owner and the
    name of a function that returns them."""
    return server_args, "_resolved_attention_backends"


# the worker


def build_drafter(target_worker: Any, *, ps: Any, **how: Any) -> Any:
    """Return SGLang's worker for the drafter."""
    return compat.build_draft_tp_worker(
        ps=dataclasses.replace(ps, pp_rank=0),
        target_model_config=target_worker.model_runner.model_config,
        **how,
    )


def dp_rank(scheduler: Any) -> int:
    return scheduler.ps.dp_rank or 0


# weight updates

# methods of the target's worker that update its weights
UPDATES: tuple[str, ...] = tuple(
    f"update_weights_from_{source}" for source in ("disk", "tensor", "distributed", "ipc")
)


def result_of(answer: Any) -> tuple[bool, str]:
    """Return success and message of the answer to an update."""
    return answer


def answer_to(recv_req: Any, success: bool, message: str) -> Any:
    """Return the answer to an update."""
    return success, message


def needs_session(recv_req: Any) -> bool:
    """Return whether an update must run within a session; there are none here."""
    return False


# requests and their KV


def row_of(req: Any) -> int:
    """Return a request's row in the slot table."""
    return req.req_pool_idx


def committed_len(req: Any) -> int:
    return req.kv_committed_len


def also_ends(req: Any) -> Set[int]:
    """Return what `min_new_tokens` holds back beside the request's and the tokenizer's tokens."""
    return set()


def offers_sampling_masks(req: Any) -> bool:
    """Return whether a request asks for masks that SGLang would serve beside a drafter; this one
    refuses itself."""
    return False


def free_left_windows(batch: Any) -> None:
    """Free the sliding-window layers' KV that no later step reads.

    SGLang's `maybe_evict_swa` does so once every 128 steps. A plain decode step adds one token, but
    ours adds up to a block, so the KV of up to 128 blocks would sit unused.
    """
    batch.maybe_evict_swa()  # at the step interval set by SGLang's environment
    if not batch.tree_cache.supports_swa():
        return
    window = batch.tree_cache.sliding_window_size
    for req in batch.reqs:
        committed = req.seqlen - 1
        left_behind = committed - window - req.kv.swa_evicted_seqlen
        # before a request's second step its prefill may still be running
        if req.decode_batch_idx >= 1 and left_behind >= FREE_AT_LEAST:
            batch._evict_swa(req, committed)


def plan_slots(forward_batch: Any, runner: Any) -> None:
    """Prepare a batch that did not come from the scheduler for its runner; nothing to do here."""


# answers

# whether tokens are streamed at certain remainders of their number, which steps that all commit as
# many may skip for ever; otherwise, when enough are unsent
sends_by_remainder = True


# recurrent states

# whether preparing a verify pass also chooses the snapshots of states that it may write
chooses_snapshots = False


def tokens_between_snapshots(batch: Any) -> int:
    """Return of how many tokens a request's snapshots hold a multiple."""
    raise AssertionError("targets with recurrent states are refused with this release")


# attention


def has_own_slot_numbers(backend: Any) -> bool:
    """Return whether a backend's KV pool numbers its slots in its own way."""
    return backend._translate_kv_loc is not None


def as_buffer_filler(lay_out: Callable[..., None]) -> Callable[..., None]:
    """Return a function of (requests, lengths, rows, verify input) with the parameters of a Triton
    backend's method that fills its buffers."""
    return lay_out


def fill_buffers(
    backend: Any, requests: int, lens: Tensor, rows: Tensor, verify_input: Any
) -> None:
    """Fill a Triton backend's buffers."""
    backend._update_target_verify_buffers(requests, lens, rows, verify_input)


# layers


def ranks_of(linear: Any) -> int:
    """Return over how many ranks a linear layer is split."""
    return linear.tp_size


def over_ranks(shards: int) -> dict[str, Any]:
    """Return the arguments with which a linear layer is divided over so many ranks: over all of
    them, or with 1 over none, so that each holds it whole."""
    return {"tp_rank": 0, "tp_size": 1} if shards == 1 else {}


def sum_experts(output: Tensor) -> Tensor:
    """Return the sum over all ranks of what a layer's experts return; they have added it up."""
    return output


def enter_gemma_layer(hidden_states: Tensor, keywords: dict[str, Any]) -> None:
    """Do what SGLang's layer does with its input besides computing; nothing here."""


def leave_gemma_layer(hidden_states: Tensor, forward_batch: Any) -> Any:
    """Return a layer's result as SGLang's layer does."""
    return hidden_states, None


def residual_stream(output: Any, forward_batch: Any) -> Tensor:
    """Return the residual stream after a layer, from what the layer returns, in memory of its own:
    the next layer may write to the output's."""
    # some layers also return what the next one is to reuse
    hidden, residual, *_ = (*output, None) if isinstance(output, tuple) else (output, None)
    if getattr(hidden, "_sglang_needs_allreduce_fusion", False):
        raise ValueError(
            "The target's layers leave their all-reduce to the next layer, fused with its norm, "
            "where a hook cannot capture the sum. Pass "
            "--enforce-disable-flashinfer-allreduce-fusion, or serve without "
            "--speculative-algorithm DFLASH."
        )
    return hidden.clone() if residual is None else hidden + residual
