"""The entry point in `sglang.srt.plugins`: SGLang calls `activate` in every process it starts.

SGLang logs and swallows exceptions of plug-ins and hooks, and would go on with its own DFLASH. So
whatever goes wrong here ends the process instead: SystemExit is not an Exception. Nothing heavy is
imported above, so that the import itself cannot fail.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

SWITCH = "SGLANG_DFLASH"


def activate() -> None:
    """Attach to SGLang, or end the process with the reason. `SGLANG_DFLASH=off` does nothing."""
    if not switched_on(os.environ.get(SWITCH)):
        logger.info("sglang_dflash is off (%s=off): DFLASH is SGLang's own.", SWITCH)
        return
    try:
        require_supported_release()
        from sglang_dflash.glue import cpu

        cpu.install_if_cpu()
        attach(hooks())
    except Exception as error:
        logger.exception("sglang_dflash could not attach")
        raise SystemExit(
            f"sglang_dflash could not attach to SGLang: {error}. Nothing was served. "
            f"Set {SWITCH}=off to use SGLang's own DFLASH."
        ) from error


def switched_on(value: str | None) -> bool:
    """Read the switch strictly."""
    if value not in (None, "on", "off"):
        raise SystemExit(f"{SWITCH}={value} is neither on nor off. Set one of the two.")
    return value != "off"


def require_supported_release() -> None:
    """End the process unless the installed SGLang is the one this package is written for."""
    from sglang_dflash.glue import release

    wanted, found = release.supported(), release.installed()
    if found != wanted:
        raise SystemExit(
            f"sglang_dflash needs sglang {wanted} but found {found}. Install sglang=={wanted}, or "
            f"a sglang_dflash release for {found}, or set {SWITCH}=off to use SGLang's own DFLASH."
        )


def hooks() -> dict[str, Callable[..., Any]]:
    """Return everything we change in SGLang: symbol -> what wraps it."""
    from sglang_dflash.glue import features, finish, memory, metrics, sampling, start

    return {
        "create_worker": _create_worker,
        "resolve_alias": _resolve_alias,
        "prepare_server_args": start.prepare_or_end,
        "model_source_paths": start.check_paths_first,
        "handle_dflash": _handle_dflash,
        "validate_request": sampling.refuse_in_scheduler,
        "update_finish_state": finish.finish_and_meter,
        "configure_capture": features.configure_capture,
        "row_headroom": memory.row_headroom,
        "default_pool_init": memory.budget_draft_kv,
        "swa_pool_init": memory.budget_draft_kv,
        "internal_state": _internal_state,
        "run_event_loop": _run_event_loop,
        "spec_metrics": metrics.describe_request,
    }


def attach(wanted: dict[str, Callable[..., Any]]) -> None:
    """Apply the hooks now and raise RuntimeError unless every one of them is in place."""
    from sglang_dflash.glue import compat, release

    registry = compat.HookRegistry
    for name, hook in wanted.items():
        registry.register(compat.SYMBOLS[name].dotted, hook, compat.HookType.AROUND)
    registry.apply_hooks()
    lost = [name for name in wanted if compat.SYMBOLS[name].dotted not in registry._patched]
    if lost:
        raise RuntimeError(f"these hooks did not attach: {', '.join(lost)}")
    logger.info("sglang_dflash attached to SGLang %s", release.installed())


def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    from sglang_dflash.glue.worker import DFlashWorker

    return DFlashWorker


def _resolve_alias(
    original: Any, speculative_algorithm: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Keep SGLang from reading the drafter before we do: our message says what to do about it."""
    if speculative_algorithm == "DFLASH":
        return speculative_algorithm
    return original(speculative_algorithm, *args, **kwargs)


def _handle_dflash(original: Any, server_args: Any) -> None:
    from sglang_dflash.glue import start
    from sglang_dflash.glue.server_args import handle_dflash

    with start.refusing():
        handle_dflash(server_args)


def _run_event_loop(original: Any, scheduler: Any) -> None:
    """Tell our worker who has the requests and publishes, once everything is in place."""
    if scheduler.spec_algorithm.is_dflash():
        scheduler.draft_worker.book.publish(scheduler)
        scheduler.draft_worker.updates.meet(scheduler)
    original(scheduler)


def _internal_state(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Add what runs and how it does to /server_info."""
    state = original(scheduler, recv_req)
    if scheduler.spec_algorithm.is_dflash():
        worker = scheduler.draft_worker
        state.internal_state["sglang_dflash"] = {
            **worker.describe(),
            "dp_rank": scheduler.ps.dp_rank or 0,
            "acceptance": worker.book.meter.snapshot(),
            "alarms": worker.book.alarm.raised,
            "free_kv_slots": scheduler.token_to_kv_pool_allocator.available_size(),
        }
    return state
