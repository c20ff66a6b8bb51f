"""DFLASH fields of /server_info, and of each response's meta_info."""

from __future__ import annotations

from typing import Any

from sglang_dflash.glue import changes, seams

META_INFO = changes.Fields("meta_info", {"dflash": "a response reports its own acceptance"})
STATE = changes.Fields(
    "GetInternalStateReqOutput",
    {"internal_state": "/server_info shows our settings and acceptance"},
)


def describe_server(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Add configuration, acceptance, alarms and our changes to SGLang to /server_info."""
    state = original(scheduler, recv_req)
    if scheduler.spec_algorithm.is_dflash():
        worker = scheduler.draft_worker
        answer = STATE.edit(state, "internal_state")
        answer["sglang_dflash"] = {
            **worker.describe(),
            "dp_rank": seams.dp_rank(scheduler),
            "acceptance": worker.book.meter.snapshot(),
            "alarms": worker.book.alarm.raised,
            "stages": worker.book.clock.snapshot(),
            "free_kv_slots": scheduler.token_to_kv_pool_allocator.available_size(),
            "changes": changes.listed(),
        }
    return state


def describe_request(
    original: Any, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """Add a request's acceptance to its meta_info, beside SGLang's own `spec_` values.

    The first token comes from prefill, not from a verify step, so the accept length omits it.
    """
    original(manager, meta_info, recv_obj, i)
    steps = meta_info.get("spec_verify_ct", 0)
    if not steps or seams.settings(manager.server_args).speculative_algorithm != "DFLASH":
        return
    rows = round(meta_info.get("spec_cap_length", 0) * steps)
    request = {
        "accept_length": (recv_obj.completion_tokens[i] - 1) / steps,
        "verify_steps": steps,
        "verified_rows": rows,
        "drafted_tokens": rows - steps,
        "accepted_tokens": meta_info["spec_num_correct_drafts"],
        "accepted_histogram": list(meta_info.get("spec_correct_drafts_histogram", ())),
    }
    META_INFO.put(meta_info, dflash=request)
