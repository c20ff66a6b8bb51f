"""A weight update that captured CUDA graphs would not see is reported as a failure."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dflash.glue import compat, seams
from sglang_dflash.glue.models.weight_updates import SOURCES, TargetUpdates, guard_in_scheduler
from sglang_dflash.glue.plugin import hooks


class Batch:
    """Requests of a step, some of them finished."""

    def __init__(self, *finished: bool) -> None:
        self.reqs = [SimpleNamespace(finished=lambda done=done: done) for done in finished]
        self.batch_is_full = True

    def filter_batch(self) -> None:
        self.reqs = [req for req in self.reqs if not req.finished()]


class Scheduler:
    """A batch that runs or has just run and, with overlap scheduling, a step in flight."""

    def __init__(self, running: Batch, *, overlap: bool = False) -> None:
        self.running_batch = running
        self.chunked_req = None
        self.last_batch = running if running.reqs else None
        self.enable_overlap = overlap
        self.processed: list[Batch] = []
        self.flushes: list[bool] = []
        if overlap:
            self.result_queue = deque([(running, "result")] if running.reqs else [])

    def process_batch_result(self, batch: Batch, result: str) -> None:
        assert result == "result"
        self.processed.append(batch)

    def is_fully_idle(self) -> bool:
        waiting = self.enable_overlap and len(self.result_queue) > 0
        return not (self.running_batch.reqs or self.last_batch or self.chunked_req or waiting)

    def flush_cache(self, empty_cache: bool) -> None:
        self.flushes.append(empty_cache)


class Worker:
    """A target with one weight, which an update replaces in place or with another tensor."""

    def __init__(
        self, *, in_place: bool, graph: object | None, scheduler: Scheduler | None = None
    ) -> None:
        self.model = nn.Linear(4, 4, bias=False)
        self.model_runner = SimpleNamespace(
            model=self.model, decode_cuda_graph_runner=graph, check_weights=None
        )
        self.init_weights_update_group = None
        self._in_place = in_place
        for name in seams.UPDATES:
            setattr(self, name, self.update)
        self.updates = TargetUpdates(self, SimpleNamespace())
        self.scheduler = scheduler or Scheduler(Batch())
        self.updates.meet(self.scheduler)

    def update(self, request: Any) -> Any:
        """Update as SGLang does, and answer as it does."""
        if self._in_place:
            self.model.weight.data.zero_()
        else:
            self.model.weight = nn.Parameter(torch.zeros(4, 4))
        return seams.answer_to(request, True, "Success")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "get_tp_group", lambda: SimpleNamespace(world_size=1))


REQUESTS = {
    "disk": {"model_path": "somewhere"},
    "tensor": {"serialized_named_tensors": []},
    "distributed": {"names": [], "dtypes": [], "shapes": []},
    "ipc": {"zmq_handles": {}},
}


def update(worker: Any, source: str = "disk") -> tuple[bool, str]:
    request = getattr(compat, f"request_{source}")(**REQUESTS[source])
    return seams.result_of(worker.updates.guard(worker.update, request))


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_of_updates_is_guarded(source: str) -> None:
    """An unguarded one would leave packed weights and a router's scale as they were."""
    worker = Worker(in_place=True, graph=None)
    name = f"update_weights_from_{source}"
    if name in seams.UPDATES:
        assert getattr(worker, name).func == worker.updates.guard
    else:
        assert hooks()[f"scheduler_update_{source}"].function is guard_in_scheduler
        assert compat.SYMBOLS[f"scheduler_update_{source}"].dotted in compat.HookRegistry._patched


@pytest.mark.skipif(bool(seams.UPDATES), reason="this SGLang has no sessions of updates")
@pytest.mark.parametrize(("source", "is_guarded"), [("disk", True), ("tensor", False)])
def test_an_update_outside_a_session_is_sglangs_to_refuse(source: str, is_guarded: bool) -> None:
    """Our message would say that some weights may be new."""
    worker = Worker(in_place=True, graph=None)
    worker.model_runner.spec_algorithm = compat.SpeculativeAlgorithm.DFLASH
    updater = SimpleNamespace(tp_worker=worker, draft_worker=worker, _session=None)
    request = getattr(compat, f"request_{source}")(**REQUESTS[source])
    answer = guard_in_scheduler(lambda _updater, asked: worker.update(asked), updater, request)
    assert ("The drafter keeps its own" in answer.message) == is_guarded


@pytest.mark.parametrize("source", SOURCES)
def test_weights_that_moved_are_a_failure_with_graphs(source: str) -> None:
    worker = Worker(in_place=False, graph=object())
    success, message = update(worker, source)
    assert not success
    assert "1 weights (for example weight) were not replaced in place" in message
    assert "restart the server" in message
    # cached prefixes of the old weights must not be mixed with new weights
    assert worker.scheduler.flushes == [False]


@pytest.mark.parametrize(
    ("in_place", "graph"),
    [
        pytest.param(True, object(), id="in place, graph"),
        pytest.param(True, None, id="in place, eager"),
        pytest.param(False, None, id="moved, eager"),
    ],
)
def test_other_weights_are_updated(in_place: bool, graph: object | None) -> None:
    worker = Worker(in_place=in_place, graph=graph)
    success, message = update(worker)
    assert success and "The drafter keeps its own" in message
    # SGLang itself flushes after a success
    assert worker.scheduler.flushes == []


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_of_answered_requests_does_not_refuse_an_update(overlap: bool) -> None:
    """Right after an answer, its request is still in the scheduler's batches."""
    batch = Batch(True, True)
    scheduler = Scheduler(batch, overlap=overlap)
    assert not scheduler.is_fully_idle()
    success, message = update(Worker(in_place=True, graph=None, scheduler=scheduler))
    assert success, message
    assert scheduler.processed == ([batch] if overlap else [])
    # or no request would be admitted again
    assert scheduler.running_batch.reqs == [] and not scheduler.running_batch.batch_is_full


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_in_flight_refuses_an_update_and_stays(overlap: bool) -> None:
    batch = Batch(True, False)
    scheduler = Scheduler(batch, overlap=overlap)
    worker = Worker(in_place=True, graph=None, scheduler=scheduler)
    success, message = update(worker)
    assert not success and "Nothing was updated" in message
    assert worker.model.weight.any()
    assert len(batch.reqs) == 2 and scheduler.last_batch is batch and scheduler.processed == []
    assert batch.batch_is_full


def test_a_prompt_half_prefilled_refuses_an_update() -> None:
    scheduler = Scheduler(Batch())
    scheduler.chunked_req = SimpleNamespace()
    success, message = update(Worker(in_place=True, graph=None, scheduler=scheduler))
    assert not success and "Nothing was updated" in message
