"""The entry point in `sglang.srt.plugins`: SGLang calls `activate` in every process it starts.

SGLang logs and swallows exceptions of plug-ins and hooks, and would go on with its own DFLASH. So
any failure here raises SystemExit, which is not an Exception, and ends the process. Nothing heavy
is imported at the top, so that the import itself cannot fail.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_dflash.environment import SWITCH, Environment

if TYPE_CHECKING:
    from sglang_dflash.glue.changes import Hook

logger = logging.getLogger(__name__)


def activate() -> None:
    """Attach to SGLang, or exit with the reason. A no-op with `SGLANG_DFLASH=off`."""
    if not _is_on():
        logger.info("sglang_dflash is off (%s=off): DFLASH is SGLang's own.", SWITCH)
        return
    try:
        require_supported_release()
        from sglang_dflash.glue import changes
        from sglang_dflash.glue.cpu.install import install_if_cpu

        install_if_cpu()
        changes.attach(hooks())
    except Exception as error:
        logger.exception("sglang_dflash could not attach")
        raise SystemExit(
            f"sglang_dflash could not attach to SGLang: {error}. Nothing was served. "
            f"Set {SWITCH}=off to use SGLang's own DFLASH."
        ) from error


def _is_on() -> bool:
    try:
        return Environment().plugin_is_on
    except ValueError as error:
        raise SystemExit(str(error)) from None


def require_supported_release() -> None:
    """Exit unless this package serves the installed release of SGLang."""
    from sglang_dflash.glue import release

    found = release.installed()
    if found not in release.SERVED:
        raise SystemExit(
            f"sglang_dflash needs sglang {' or '.join(release.SERVED)} but found {found}. Install "
            f"{release.which_to_install()}, or a sglang_dflash release for {found}, or set "
            f"{SWITCH}=off to use SGLang's own DFLASH."
        )


def hooks() -> dict[str, Hook]:
    """Return our hooks on SGLang's functions: symbol -> wrapper and reason.

    A release whose table lacks a symbol does that part itself. All other changes are made to
    objects once they exist: `changes.listed()` has them all.
    """
    from sglang_dflash.glue import compat

    return {name: hook for name, hook in _all_hooks().items() if name in compat.SYMBOLS}


def _all_hooks() -> dict[str, Hook]:
    from sglang_dflash.glue.after_step import describe, request_end
    from sglang_dflash.glue.changes import Hook
    from sglang_dflash.glue.models import weight_updates
    from sglang_dflash.glue.sampling import refusals
    from sglang_dflash.glue.startup import early_exit, memory, ranks

    budget = Hook(memory.budget_draft_kv, "the KV budget includes the draft KV")
    guard = Hook(
        weight_updates.guard_in_scheduler,
        "refuses an update with a reason, and rebuilds state derived from weights",
    )
    return {
        "create_worker": Hook(_create_worker, "DFLASH runs in our worker"),
        "resolve_alias": Hook(_resolve_alias, "the drafter is checked before SGLang reads it"),
        "prepare_server_args": Hook(
            early_exit.prepare_or_end, "a refusal exits with one sentence, not a traceback"
        ),
        "resolve_once": Hook(
            early_exit.resolve_or_end, "a refusal exits with one sentence, not a traceback"
        ),
        "model_source_paths": Hook(
            early_exit.check_paths_first, "SGLang would take a missing folder for a model name"
        ),
        "meet_ranks": Hook(
            ranks.meet, "a rank that is missing, or has other settings, ends the server"
        ),
        "handle_dflash": Hook(_handle_dflash, "our checks and defaults instead of SGLang's"),
        "validate_request": Hook(
            refusals.refuse_in_scheduler, "refuses only requests that cannot be served exactly"
        ),
        "update_finish_state": Hook(
            request_end.finish_and_meter, "stop checks run token by token, and steps are metered"
        ),
        "row_headroom": Hook(
            memory.row_headroom, "a step reserves two blocks in a request's slot-table row"
        ),
        "default_pool_init": budget,
        "swa_pool_init": budget,
        "draft_cell_size": Hook(
            memory.budget_whole_drafter, "ranks that cannot share the drafter hold all draft KV"
        ),
        "internal_state": Hook(
            describe.describe_server, "/server_info shows our settings and acceptance"
        ),
        "run_event_loop": Hook(
            _run_event_loop, "gives our worker the scheduler, and names a rank that hangs"
        ),
        **{f"scheduler_update_{source}": guard for source in weight_updates.SOURCES},
        "scheduler_update_end": Hook(
            weight_updates.renew_after_session, "rebuilds state derived from weights"
        ),
        "spec_metrics": Hook(describe.describe_request, "a response reports its own acceptance"),
        **_hooks_on_models(),
        **_hooks_on_disaggregation(),
    }


def _hooks_on_models() -> dict[str, Hook]:
    from sglang_dflash.glue.changes import Hook
    from sglang_dflash.glue.startup import drafter_format, feature_capture

    return {
        "parse_config": Hook(
            drafter_format.parse_config, "configs of the speculators format are translated"
        ),
        "configure_capture": Hook(
            feature_capture.configure_capture, "some targets capture features under another name"
        ),
    }


def _hooks_on_disaggregation() -> dict[str, Hook]:
    from sglang_dflash.glue.changes import Hook
    from sglang_dflash.glue.step import disaggregation

    kept = "a decode server keeps a retracted request's draft KV, too"
    return {
        "begin_decoding": Hook(
            disaggregation.begin_decoding, "a decode server starts from our state, not SGLang's"
        ),
        "back_up_kv": Hook(disaggregation.back_up, kept),
        "restore_kv": Hook(disaggregation.restore, kept),
        "match_ranks": Hook(
            disaggregation.match_ranks, "draft KV that cannot be redistributed is refused"
        ),
    }


def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    from sglang_dflash.glue.step.worker import DFlashWorker

    return DFlashWorker


def _resolve_alias(
    original: Any, speculative_algorithm: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Keep SGLang from reading the drafter before we do: our error message says what to do."""
    if speculative_algorithm == "DFLASH":
        return speculative_algorithm
    return original(speculative_algorithm, *args, **kwargs)


def _handle_dflash(original: Any, server_args: Any) -> None:
    from sglang_dflash.glue.startup import early_exit
    from sglang_dflash.glue.startup.server_args import handle_dflash

    with early_exit.refusing():
        handle_dflash(server_args)


def _run_event_loop(original: Any, scheduler: Any) -> None:
    """Give our worker the scheduler, for metrics and weight updates, once it is set up; name a
    rank that stops taking part."""
    if scheduler.spec_algorithm.is_dflash():
        from sglang_dflash.glue import changes
        from sglang_dflash.glue.startup import ranks

        changes.log()
        scheduler.draft_worker.book.publish(scheduler)
        scheduler.draft_worker.updates.meet(scheduler)
        ranks.watched(lambda: original(scheduler))
    else:
        original(scheduler)
