"""Weight updates of a running server: they change the target, never the drafter.

SGLang would load a target's checkpoint into the drafter, too, and a failed update ends the
server. Here each of its update endpoints goes through `TargetUpdates`, which refuses updates that
cannot work, answers a failure with its reason, and rebuilds everything derived from weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_dflash.glue import changes, compat, seams
from sglang_dflash.glue.cpu import products
from sglang_dflash.glue.models.gemma4_layers import fold_router_scales

logger = logging.getLogger(__name__)

SOURCES = ("disk", "tensor", "distributed", "ipc")
DONE = (
    "The target's weights were updated. The drafter keeps its own: answers come from the new "
    "weights, but acceptance may drop until the drafter is trained for them."
)
NOT_FLUSHED = (
    " The cache was not flushed (flush_cache=false): cached prefixes and requests in flight keep "
    "using KV of the old weights. POST /flush_cache when the server is idle."
)

SCHEDULER = changes.Fields(
    "Scheduler",
    {
        "last_batch": "an update drops a batch whose requests are all finished",
        "result_queue": "an update drains the steps of finished requests",
        "running_batch": "an update drops requests that are finished",
    },
)

# takes a request; its answer is the release's
Update = Callable[[Any], Any]


class TargetUpdates:
    """Guards every update of the target's weights: at the target worker's methods, or from the
    scheduler's, where it updates the runners itself."""

    def __init__(self, target_worker: Any, draft_runner: Any) -> None:
        self._runner = target_worker.model_runner
        self._scheduler: Any = None
        self._guarded: dict[str, Update] = {}
        for name in seams.UPDATES:
            self._guarded[name] = functools.partial(self.guard, getattr(target_worker, name))
            changes.replace(
                target_worker,
                name,
                self._guarded[name],
                why="refuses an update with a reason, and rebuilds state derived from weights",
            )
        join = target_worker.init_weights_update_group
        changes.replace(
            target_worker,
            "init_weights_update_group",
            lambda recv_req: _run(join, recv_req),
            why="a failure is reported to the client and does not end the server",
        )
        self._check = self._runner.check_weights
        changes.replace(
            self._runner,
            "check_weights",
            self._check_target,
            why="rebuilds state derived from weights after a check",
        )
        changes.replace(
            draft_runner,
            "check_weights",
            lambda **_asked: None,
            why="the checker resets weights, and the drafter's could not be reloaded",
        )

    def meet(self, scheduler: Any) -> None:
        """Attach the scheduler, which has the requests and the cache."""
        self._scheduler = scheduler

    def update_from_tensor(self, recv_req: Any) -> Any:
        """Update the target, where SGLang asks the spec worker to."""
        return self._guarded["update_weights_from_tensor"](recv_req)

    def guard(self, update: Update, recv_req: Any) -> Any:
        """Update the target if that can work; return the answer."""
        reason = self._refuse(recv_req)
        if reason is not None:
            return seams.answer_to(recv_req, False, reason)
        failure = self._agreed(self._attempt(update, recv_req))
        if failure is None:
            return seams.answer_to(recv_req, True, self.describe(recv_req))
        if recv_req.flush_cache:
            # SGLang flushes only on success, but some weights may already be new
            self._scheduler.flush_cache(empty_cache=recv_req.torch_empty_cache)
        message = (
            f"{failure} The target may hold some of the new weights. Update it again with all of "
            "them, or restart the server."
        )
        return seams.answer_to(recv_req, False, message)

    def describe(self, recv_req: Any) -> str:
        """Return the message of a successful update, with what it did not do."""
        return DONE if recv_req.flush_cache else DONE + NOT_FLUSHED

    def _refuse(self, recv_req: Any) -> str | None:
        if getattr(recv_req, "recapture_cuda_graph", False):
            return (
                "DFLASH does not recapture CUDA graphs (recapture_cuda_graph=true). Nothing was "
                "updated. Drop it: weights are replaced in place, where captured graphs read them."
            )
        if getattr(recv_req, "selector", "all") == "draft":
            return (
                "DFLASH does not update drafters (selector=draft). Nothing was updated. Restart "
                "the server with another --speculative-draft-model-path."
            )
        if not recv_req.flush_cache:
            return None
        self._drain_finished()
        if not self._scheduler.is_fully_idle():
            return (
                "The cache cannot be flushed while requests are in flight, as after "
                "/pause_generation. Nothing was updated. Abort them (mode abort), or pass "
                "flush_cache=false to let them continue with KV of the old weights."
            )
        return None

    def _drain_finished(self) -> None:
        """Process what is left of the batches if every request in them is finished.

        A request's answer is sent before the scheduler drops it from its batches, and with overlap
        scheduling while one more step runs: an update right after the answer still finds both.
        """
        scheduler = self._scheduler
        batches = [b for b in (scheduler.running_batch, scheduler.last_batch) if b is not None]
        in_batches = [req for batch in batches for req in batch.reqs]
        if scheduler.chunked_req is None and all(req.finished() for req in in_batches):
            results = SCHEDULER.edit(scheduler, "result_queue") if scheduler.enable_overlap else ()
            while results:
                scheduler.process_batch_result(*results.popleft())
            SCHEDULER.write(scheduler, last_batch=None)
            running = SCHEDULER.edit(scheduler, "running_batch")
            running.filter_batch()
            # SGLang resets this only where it filters itself, and admits no request until then
            running.batch_is_full = False

    def _attempt(self, update: Update, recv_req: Any) -> str | None:
        """Update; return the reason if it failed, else None."""
        before = addresses(self._runner.model)
        success, message = _run(lambda request: seams.result_of(update(request)), recv_req)
        self.renew()
        if not success:
            return message
        after = addresses(self._runner.model)
        moved = [name for name in after if after[name] != before.get(name)]
        if moved and self._runner.decode_cuda_graph_runner is not None:
            return (
                f"{len(moved)} weights (for example {moved[0]}) were not replaced in place, so "
                "captured CUDA graphs still read the old ones."
            )
        return None

    def _check_target(self, **asked: Any) -> Any:
        try:
            return self._check(**asked)
        finally:
            self.renew()

    def renew(self) -> None:
        """Rebuild everything derived from weights."""
        products.forget_packed(self._runner.model)
        fold_router_scales(self._runner.model)

    def _agreed(self, failure: str | None) -> str | None:
        """Return the first failure of any rank: all ranks must answer, and flush, alike."""
        group = compat.get_tp_group()
        failures = [failure] * group.world_size
        if group.world_size > 1:
            torch.distributed.all_gather_object(failures, failure, group=group.cpu_group)
        return next((reason for reason in failures if reason is not None), None)


def guard_in_scheduler(original: Any, updater: Any, recv_req: Any) -> Any:
    """Wrap an update of the scheduler's, where it updates the runners itself."""
    is_ours = updater.tp_worker.model_runner.spec_algorithm.is_dflash()
    if not is_ours or (updater._session is None and seams.needs_session(recv_req)):
        # SGLang refuses an update outside a session, and says so
        return original(updater, recv_req)
    return updater.draft_worker.updates.guard(functools.partial(original, updater), recv_req)


def renew_after_session(original: Any, updater: Any, recv_req: Any) -> Any:
    """Wrap the end of an update in several parts, which may change weights a last time."""
    answer = original(updater, recv_req)
    if updater.tp_worker.model_runner.spec_algorithm.is_dflash():
        updater.draft_worker.updates.renew()
    return answer


def _run(update: Callable[[Any], tuple[bool, str]], recv_req: Any) -> tuple[bool, str]:
    """Run an update; return an exception as a failed result, so that the server survives it."""
    try:
        return update(recv_req)
    except Exception as error:
        logger.exception("The target's weights could not be updated")
        return False, f"{type(error).__name__}: {error}."


def addresses(model: Any) -> dict[str, int]:
    """Return the data pointer of each parameter of a model."""
    return {name: weight.data_ptr() for name, weight in model.named_parameters()}
