"""The timing of captured graphs, with a fake runner and a fake clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.glue.step import graph_times

SIZES = list(range(16, 16 * 49, 16))


class Runner:
    """A runner whose replays take 1 ms and 0.1 ms per row, and note their graph."""

    def __init__(self) -> None:
        self.backend = self
        self.replayed: list[Any] = []
        self.capture_num_tokens = SIZES
        self.laid_out: list[tuple[int, int, int]] = []

    def _make_graph_key(self, size: int) -> Any:
        return ("graph", size)

    def replay(self, key: Any, _batch: None) -> float:
        self.replayed.append(key)
        return 1 + 0.1 * key[1]

    def lay_out(self, rows: int, *, requests: int, width: int) -> None:
        self.laid_out.append((rows, requests, width))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time, in seconds, that only replays spend."""
    now = [0.0]

    def replay_ms(replay: Any) -> float:
        ms = replay()
        now[0] += (1 + graph_times.REPLAYS) * ms / 1000
        return ms

    monkeypatch.setattr(graph_times, "_replay_ms", replay_ms)
    monkeypatch.setattr(graph_times, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.mark.parametrize("count", [1, 2, 3, 9, 18, 48])
def test_every_size_has_its_turn(count: int) -> None:
    assert sorted(graph_times._outside_in(SIZES[:count])) == SIZES[:count]


def test_a_coarse_grid_comes_before_a_finer_one() -> None:
    order = graph_times._outside_in(list(range(1, 19)))
    assert sorted(order[:4]) == [1, 9, 17, 18]
    assert order[4:] == [5, 13, 3, 7, 11, 15, 2, 4, 6, 8, 10, 12, 14, 16]


def test_what_is_not_timed_lies_between_its_neighbours() -> None:
    timed = {16: 2.0, 48: 4.0, 96: 4.0}
    assert graph_times._between(timed, 32) == 3.0
    assert graph_times._between(timed, 40) == 3.5
    assert graph_times._between(timed, 64) == 4.0
    # outside: the nearest
    assert graph_times._between(timed, 8) == 2.0
    assert graph_times._between(timed, 128) == 4.0


def test_every_graph_is_prepared_and_timed(clock: list[float]) -> None:
    runner, prepared = Runner(), []
    found = graph_times.time_graphs(runner, [48, 16, 32], prepared.append)
    assert found == pytest.approx({16: 2.6, 32: 4.2, 48: 5.8})
    assert list(found) == [16, 32, 48]
    assert runner.replayed == [("graph", size) for size in prepared]
    assert sorted(prepared) == [16, 32, 48]


@pytest.mark.parametrize(
    ("budget_ms", "timed"),
    [
        pytest.param(300.0, None, id="not even for a coarse grid"),
        pytest.param(1100.0, [*SIZES[::8], SIZES[-1]], id="for a coarse grid"),
        pytest.param(1e9, SIZES, id="for all"),
    ],
)
def test_a_slow_model_does_not_delay_the_start(
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    budget_ms: float,
    timed: list[int] | None,
) -> None:
    """Beyond the budget graphs are interpolated. Here the true times are on a line: one that lay
    outside what was timed would show, and the policy would take a large graph for a cheap one."""
    monkeypatch.setattr(graph_times, "BUDGET_MS", budget_ms)
    runner = Runner()
    found = graph_times.time_graphs(runner, SIZES, lambda _size: None)
    assert found == pytest.approx({size: 1 + 0.1 * size for size in SIZES})
    assert list(found) == SIZES
    if timed is not None:
        assert sorted(size for _, size in runner.replayed) == timed


def test_without_any_time_one_graph_stands_for_all(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_times, "BUDGET_MS", 0.0)
    runner = Runner()
    found = graph_times.time_graphs(runner, SIZES, lambda _size: None)
    assert len(runner.replayed) == len(set(found.values())) == 1
    assert list(found) == SIZES


def test_a_step_is_timed_with_full_blocks(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs come from both models' graphs, and from the head where it is outside of them."""
    monkeypatch.setattr(graph_times, "time_head", lambda _runtime: {0: 0.0, 1000: 100.0})
    monkeypatch.setattr(graph_times, "BUDGET_MS", 1e9)
    target: Any = Runner()
    draft: Any = Runner()
    draft.capture_bs = [1, 8, 32]
    config = SimpleNamespace(block_size=16, overlap=SimpleNamespace(schedule=True))
    graphs = SimpleNamespace(largest_with_head=8)
    runtime: Any = SimpleNamespace(config=config, draft_graphs=graphs)
    costs = graph_times.time_step(runtime, target, draft)
    assert sorted(target.laid_out) == [(rows, rows // 16, 16) for rows in SIZES]
    assert sorted(size for _, size in draft.replayed) == [1, 8, 32]
    # 8 rows in the graph of 16; 16 rows, drafts in the graph of 8, whose head is part of it
    assert costs.step_ms(8, 0)[:2] == pytest.approx([2.6, 2.6 + 1.8])
    # 32 drafts outside a graph
    assert costs.step_ms(32, 0)[:2] == pytest.approx([4.2, 7.4 + 4.2 + 3.2])


def test_the_head_is_timed_at_several_numbers_of_drafts(clock: list[float]) -> None:
    asked = []

    def draft(rows: Any, noise: Any, *, wanted: int, with_confidence: bool, anchors: Any) -> float:
        assert anchors.shape == noise.scales.shape
        assert with_confidence
        # a tied embedding requires gradients
        assert not torch.is_grad_enabled()
        asked.append((tuple(rows.shape), tuple(noise.keys.shape), tuple(noise.scales.shape)))
        return wanted / 10

    weight = torch.zeros(50, 24, dtype=torch.bfloat16)
    runtime: Any = SimpleNamespace(
        block_head=SimpleNamespace(draft=draft, as_blocks=lambda drafts: (1, drafts)),
        shares_rows=True,
        target_runner=SimpleNamespace(
            model=SimpleNamespace(lm_head=SimpleNamespace(weight=weight))
        ),
    )
    found = graph_times.time_head(runtime)
    assert found == {drafts: drafts / 10 for drafts in graph_times.HEAD_DRAFTS}
    assert asked == [((n, 24), (1, n), (1,)) for n in graph_times.HEAD_DRAFTS]


def test_the_clock_is_told_of_each_launch_before_it() -> None:
    order: list[Any] = []
    runner, clock = Runner(), SimpleNamespace(launches_graph=lambda: order.append("told"))
    runner.replayed = order
    graph_times.tell_of_launches(runner, clock)  # type: ignore[arg-type]
    assert runner.replay(("graph", 16), None) == pytest.approx(2.6)
    runner.replay(("graph", 32), None)
    assert order == ["told", ("graph", 16), "told", ("graph", 32)]
    graph_times.tell_of_launches(None, clock)  # type: ignore[arg-type]  # without graphs
