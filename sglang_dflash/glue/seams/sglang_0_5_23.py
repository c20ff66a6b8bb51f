"""SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from torch import Tensor

from sglang_dflash.glue import compat

# server arguments: the record keeps what the user asked for, and decisions lie over it


def settings(server_args: Any = None) -> Any:
    """Return the values in effect of server arguments; without any, of this process's own."""
    if isinstance(server_args, compat.ResolvingConfig):
        return server_args
    return compat.resolving_view(compat.get_server_args() if server_args is None else server_args)


def decide(server_args: Any, **values: Any) -> None:
    """Set server arguments; only for `changes.Settings`."""
    compat.declare_resolution(compat.record_of(settings(server_args)), "sglang_dflash", **values)


def model_config(server_args: Any) -> Any:
    """Return the target's config."""
    return compat.model_config_of(server_args)


def asks_for_quantised_drafter(server_args: Any) -> bool:
    """Return whether the drafter's quantisation, which is not None, was asked for."""
    return bool(server_args._speculative_draft_quantization_explicitly_set)


def draft_kv_dtype(server_args: Any) -> str | None:
    """Return the type of KV that was asked for the drafter alone."""
    return server_args.speculative_draft_kv_cache_dtype


def also_refused(server_args: Any) -> dict[str, bool]:
    """Return what this release offers beyond the others and DFLASH does not support: what a refusal
    calls it, and whether it was asked for."""
    return {
        "--enable-unified-memory, which moves KV to other slots": server_args.enable_unified_memory,
        "--enable-watermark, whose sampler our kernels do not have": server_args.enable_watermark,
        f"DP attention (--attn-dp-size {server_args.attn_dp_size}), where a model's ranks have "
        "different requests": server_args.attn_dp_size != 1,
        f"attention context parallelism (--attn-cp-size {server_args.attn_cp_size})": (
            server_args.attn_cp_size != 1
        ),
    }


def backends_for_model_checks(server_args: Any) -> tuple[Any, str]:
    """Return where the checks of a model's arguments find the attention backends: the owner and the
    name of a function that returns them."""
    return compat.model_hook, "attention_backends_of"


# the worker


def build_drafter(target_worker: Any, **how: Any) -> Any:
    """Return SGLang's worker for the drafter."""
    return compat.build_draft_tp_worker(
        target_model_config=target_worker.model_runner.model_config, **how
    )


def dp_rank(scheduler: Any) -> int:
    return compat.get_parallel().dp_rank or 0


# weight updates

# methods of the target's worker that update its weights: the scheduler does so itself
UPDATES: tuple[str, ...] = ()


def result_of(answer: Any) -> tuple[bool, str]:
    """Return success and message of the answer to an update."""
    return answer.success, answer.message


def answer_to(recv_req: Any, success: bool, message: str) -> Any:
    """Return the answer to an update."""
    kinds = {
        compat.request_disk: compat.answer_disk,
        compat.request_tensor: compat.answer_tensor,
        compat.request_distributed: compat.answer_distributed,
        compat.request_ipc: compat.answer_ipc,
    }
    return kinds[type(recv_req)](success=success, message=message)


def needs_session(recv_req: Any) -> bool:
    """Return whether an update must run within a session, which may hold several."""
    return isinstance(recv_req, compat.request_tensor | compat.request_distributed)


# requests and their KV


def row_of(req: Any) -> int:
    """Return a request's row in the slot table."""
    return req.kv.req_pool_idx


def committed_len(req: Any) -> int:
    return req.kv.kv_committed_len


def also_ends(req: Any) -> Set[int]:
    """Return what `min_new_tokens` holds back beside the request's and the tokenizer's tokens."""
    return req.eos_token_ids or set()


def offers_sampling_masks(req: Any) -> bool:
    """Return whether a request asks for masks that SGLang would serve beside a drafter."""
    return req.return_sampling_mask


def free_left_windows(batch: Any) -> None:
    """Free the sliding-window layers' KV that no later step reads; SGLang counts tokens here, not
    steps."""
    batch.maybe_evict_swa()


def plan_slots(forward_batch: Any, runner: Any) -> None:
    """Prepare a batch that did not come from the scheduler for its runner."""
    translator = runner.kv_index_translator
    translator.own_plan(forward_batch).bind(forward_batch, translator)


# answers

# whether tokens are streamed at certain remainders of their number, which steps that all commit as
# many may skip for ever; otherwise, when enough are unsent
sends_by_remainder = False


# recurrent states

# whether preparing a verify pass also chooses the snapshots of states that it may write
chooses_snapshots = True


def tokens_between_snapshots(batch: Any) -> int:
    """Return of how many tokens a request's snapshots hold a multiple."""
    return compat.mamba_track_grid(batch.tree_cache.page_size)


# attention


def has_own_slot_numbers(backend: Any) -> bool:
    """Return whether a backend's KV pool numbers its slots in its own way."""
    return backend.kv_index_translator.is_translating


def as_buffer_filler(lay_out: Callable[..., None]) -> Callable[..., None]:
    """Return a function of (requests, lengths, rows, verify input) with the parameters of a Triton
    backend's method that fills its buffers."""

    def fill(_plan: Any, bs: int, seq_lens: Tensor, spec_info: Any, rows: Tensor) -> None:
        # the plan translates slots of a pool with its own numbering, which ours does not serve
        lay_out(bs, seq_lens, rows, spec_info)

    return fill


def fill_buffers(
    backend: Any, requests: int, lens: Tensor, rows: Tensor, verify_input: Any
) -> None:
    """Fill a Triton backend's buffers."""
    backend._update_target_verify_buffers(None, requests, lens, verify_input, rows)


# layers


def ranks_of(linear: Any) -> int:
    """Return over how many ranks a linear layer is split."""
    return compat.get_group_rank_size(linear.tp_group)[1]


def over_ranks(shards: int) -> dict[str, Any]:
    """Return the arguments with which a linear layer is divided over so many ranks: over all of
    them, or with 1 over none, so that each holds it whole."""
    return {"parallel_group": "replicated"} if shards == 1 else {}


def sum_experts(output: Tensor) -> Tensor:
    """Return the sum over all ranks of what a layer's experts return, which is this rank's part."""
    return compat.sum_post_experts_output(output)


def enter_gemma_layer(hidden_states: Tensor, keywords: dict[str, Any]) -> None:
    """Do what SGLang's layer does with its input besides computing: capture it for the drafter."""
    capture = keywords.get("capture_output")
    if capture is not None:
        # no layer of ours writes into its input, so it need not be copied
        capture(hidden_states, owned=True)


def leave_gemma_layer(hidden_states: Tensor, forward_batch: Any) -> Any:
    """Return a layer's result as SGLang's layer does: it is the whole residual stream."""
    return compat.residual_is_written(hidden_states, forward_batch)


def residual_stream(output: Any, forward_batch: Any) -> Tensor:
    """Return the residual stream after a layer, from what the layer returns, in memory of its own:
    the next layer may write to the output's."""
    # some layers also return what the next one is to reuse
    hidden, residual, *_ = (*output, None) if isinstance(output, tuple) else (output, None)
    if forward_batch is not None and forward_batch.residual_stream is not None:
        # what is left to add, or to sum over ranks, is in the batch
        return compat.stream_snapshot(hidden, forward_batch)
    return hidden.clone() if residual is None else hidden + residual
