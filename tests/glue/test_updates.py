"""An update of weights that captured graphs would not see is a failure, and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dflash.glue import compat
from sglang_dflash.glue.updates import SOURCES, TargetUpdates


class Worker:
    """A target with one weight, which an update replaces in place or by another tensor."""

    def __init__(self, *, in_place: bool, graph: object | None) -> None:
        self.model = nn.Linear(4, 4, bias=False)
        self.model_runner = SimpleNamespace(
            model=self.model, decode_cuda_graph_runner=graph, check_weights=None
        )
        self.flushes: list[bool] = []
        self.init_weights_update_group = None
        for source in SOURCES:
            setattr(self, f"update_weights_from_{source}", lambda _: self._update(in_place))
        updates = TargetUpdates(self, SimpleNamespace())
        updates.meet(
            SimpleNamespace(
                is_fully_idle=lambda: True,
                flush_cache=lambda empty_cache: self.flushes.append(empty_cache),
            )
        )

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
    assert "1 weights (weight is one) were not replaced in place" in message
    assert "restart the server" in message
    # prefixes of the old weights must not meet some of the new
    assert worker.flushes == [False]


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
    # SGLang flushes after a success
    assert worker.flushes == []
