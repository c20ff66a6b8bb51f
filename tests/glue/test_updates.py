"""A weight update that captured CUDA graphs would not see is reported as a failure."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dflash.glue import compat
from sglang_dflash.glue.models.weight_updates import SOURCES, TargetUpdates


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
        for source in SOURCES:
            setattr(self, f"update_weights_from_{source}", lambda _: self._update(in_place))
        updates = TargetUpdates(self, SimpleNamespace())
        self.scheduler = scheduler or Scheduler(Batch())
        updates.meet(self.scheduler)

    def _update(self, in_place: bool) -> tuple[bool, str]:
        if in_place:
            self.model.weight.data.zero_()
        else:
            self.model.weight = nn.Parameter(torch.zeros(4, 4))
        return True, "Success"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "get_tp_group", lambda: SimpleNamespace(world_size=1))


def update(worker: Any, source: str = "disk") -> tuple[bool, str]:
    request = SimpleNamespace(flush_cache=True, torch_empty_cache=False)
    return getattr(worker, f"update_weights_from_{source}")(request)


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
