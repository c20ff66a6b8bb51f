"""What a step costs: timed graphs, corrected while serving, and costs that are learnt."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglang_dflash.costs import GraphCosts, LearntCosts

BLOCK = 16
# a 31B model on one H200: up to about 128 rows are nearly free, then each costs 0.1 ms
VERIFY_MS = {
    rows: 16.5 + float(np.logaddexp(0, (rows - 128) / 20)) * 2 for rows in range(16, 769, 16)
}
DRAFT_MS = {1: 1.6, 8: 1.8, 16: 2.3, 32: 3.9, 64: 7.5, 128: 15.0}
MS_PER_TOKEN = 2.6e-4


def graph_costs() -> GraphCosts:
    return GraphCosts(BLOCK, VERIFY_MS, DRAFT_MS)


def test_a_batch_is_padded_to_the_next_graphs() -> None:
    costs = GraphCosts(4, {16: 1.0, 32: 2.0, 48: 4.0}, {4: 0.5, 8: 0.75})
    assert costs.step_ms(8, 0).tolist() == [1, 1.75, 2.75, 2.75]
    assert costs.step_ms(3, 0).tolist() == [1, 1.5, 1.5, 1.5]
    assert costs.step_ms(17, 0).tolist()[0] == 2
    assert costs.step_ms(16, 0).tolist() == [1, 3.5, 5.5, np.inf]


@pytest.mark.parametrize(("requests", "draft_ms"), [(8, 3), (9, 3), (13, 6), (16, 6), (20, 9)])
def test_a_large_batch_drafts_in_several_passes_of_the_same_size(
    requests: int, draft_ms: float
) -> None:
    costs = GraphCosts(2, {64: 1.0}, {4: 1.0, 5: 2.0, 8: 3.0})
    assert costs.step_ms(requests, 0).tolist() == [1, 1 + draft_ms]


def test_a_head_outside_the_draft_graph_costs_by_the_drafts_that_are_verified() -> None:
    costs = GraphCosts(4, {64: 1.0}, {8: 0.5}, {10: 1.0, 20: 2.0, 40: 8.0}, head_in_graph=4)
    # part of the graph
    assert costs.step_ms(4, 0).tolist() == [1, 1.5, 1.5, 1.5]
    # 5, 10 and 15 drafts, then 8, 16 and 24: between timings on a line, below the first its time
    assert costs.step_ms(5, 0) == pytest.approx([1, 2.5, 2.5, 3])
    assert costs.step_ms(8, 0) == pytest.approx([1, 2.5, 3.1, 4.7])


def test_rows_that_are_shared_out_fill_a_graph() -> None:
    verify, head = {4: 1.0, 8: 2.0, 12: 3.0, 16: 4.0, 24: 6.0}, {4: 1.0, 24: 6.0}
    costs = GraphCosts(4, verify, {4: 0.5, 8: 0.75}, head, head_in_graph=4)
    shared = costs.shared(4)
    # the head is part of the graph: each request may have the whole block
    assert (shared.rows, shared.widths) == ([8, 12, 16], [4, 4, 4])
    assert shared.extra.tolist() == [1, 2, 3]
    assert costs.shared_ms(4, 0).tolist() == [2.5, 3.5, 4.5]
    costs = GraphCosts(8, verify, {4: 0.5, 8: 0.75}, head, head_in_graph=4)
    shared = costs.shared(5)
    # 15, 25, 35 and 35 drafts for at most 4, 6, 8 and 8 rows
    assert (shared.rows, shared.widths) == ([8, 12, 16, 24], [4, 6, 8, 8])
    # beyond the last timing on the line of the last two
    head_ms = np.array([3.75, 6.25, 8.75, 8.75])
    assert costs.shared_ms(5, 0) == pytest.approx([2.75, 3.75, 4.75, 6.75] + head_ms)
    assert costs.shared(24).rows == [] and len(costs.shared_ms(24, 0)) == 0


def test_a_step_that_shares_corrects_its_graph_for_all_steps() -> None:
    costs = graph_costs()
    before, shared = costs.step_ms(32, 0), costs.shared(32)
    place = shared.rows.index(128)
    assert costs.shared_ms(32, 0)[place] == pytest.approx(before[3])
    for _ in range(300):
        costs.record(32, 8, 1000, 1.25 * before[3] + 1000 * MS_PER_TOKEN, rows=128)
        costs.record(32, 8, 1000, 500.0, rows=130)
    assert costs.step_ms(32, 1000)[3] == pytest.approx(1.25 * before[3] + 0.26, rel=0.02)
    assert costs.shared_ms(32, 1000)[place] == costs.step_ms(32, 1000)[3]
    assert costs.step_ms(32, 0)[7] == pytest.approx(before[7])


def serve_contexts(
    costs: GraphCosts, true_ms: dict[int, float], *, steps: int, fixed_context: int | None = None
) -> None:
    rng = np.random.default_rng(3)
    truth = GraphCosts(BLOCK, true_ms, DRAFT_MS)
    for k in range(steps):
        requests, width = (8, 32, 32)[k % 3], int(rng.integers(1, 9))
        context = fixed_context or requests * (500 + 40 * (k % 50))
        ms = truth.step_ms(requests, 0)[width - 1] + MS_PER_TOKEN * context
        costs.record(requests, width, context, float(ms * rng.normal(1, 0.02)))


@pytest.mark.parametrize("fixed_context", [None, 30_000])
def test_the_cost_of_context_is_found(fixed_context: int | None) -> None:
    costs = graph_costs()
    serve_contexts(costs, VERIFY_MS, steps=300, fixed_context=fixed_context)
    assert costs.ms_per_token == pytest.approx(MS_PER_TOKEN, rel=0.1)
    # widths that never ran cost as much more
    extra = costs.step_ms(32, 60_000)[15] - graph_costs().step_ms(32, 0)[15]
    assert extra == pytest.approx(60_000 * MS_PER_TOKEN, rel=0.1)


def test_a_wrong_timing_at_a_short_context_is_not_taken_for_the_cost_of_context() -> None:
    costs = graph_costs()
    for _ in range(300):
        costs.record(1, 16, 400, 1.1 * 18.1)
    assert costs.step_ms(1, 400)[15] == pytest.approx(1.1 * 18.1, rel=0.02)
    assert costs.ms_per_token * 400 < 0.2


def test_a_wrong_timing_is_mended_and_the_right_ones_are_kept() -> None:
    wrong = {**VERIFY_MS, 128: VERIFY_MS[128] / 1.6}
    costs = GraphCosts(BLOCK, wrong, DRAFT_MS)
    serve_contexts(costs, VERIFY_MS, steps=3000)
    expected = graph_costs().step_ms(32, 0)[:8] + 30_000 * MS_PER_TOKEN
    assert costs.step_ms(32, 30_000)[:8] == pytest.approx(expected, rel=0.05)
    json.dumps(costs.snapshot())


def test_a_correction_has_limits() -> None:
    costs = graph_costs()
    for _ in range(1000):
        costs.record(1, 1, 0, 20 * 16.5)
    assert costs.step_ms(1, 0)[0] == pytest.approx(2 * VERIFY_MS[16])
    for _ in range(3000):
        costs.record(1, 1, 0, 0.1)
    assert costs.step_ms(1, 0)[0] == pytest.approx(VERIFY_MS[16] / 2)


@pytest.mark.parametrize("ms", [500.0, 1e5, 0.01, 0.0, -1.0, float("nan"), float("inf")])
def test_a_single_strange_measurement_is_ignored(ms: float) -> None:
    costs = graph_costs()
    costs.record(32, 4, 30_000, 28.0)
    before = costs.step_ms(32, 30_000)
    costs.record(32, 4, 30_000, ms)
    assert (costs.step_ms(32, 30_000) == before).all()


def test_a_step_that_no_graph_holds_is_ignored() -> None:
    costs = graph_costs()
    costs.record(256, 16, 1000, 50.0)
    assert np.isfinite(costs.step_ms(256, 1000)[:3]).all()


def linear_ms(requests: int, width: int, context: int) -> float:
    drafted = width > 1
    return 5 + 0.4 * requests * width + drafted * (2 + 0.3 * requests) + 0.001 * context


def test_a_linear_cost_is_learnt() -> None:
    rng = np.random.default_rng(4)
    costs = LearntCosts(BLOCK)
    for k in range(400):
        requests, width = int(rng.integers(1, 17)), (1, 4, 8, 16)[k % 4]
        context = requests * int(rng.integers(10, 1000))
        ms = linear_ms(requests, width, context) * rng.normal(1, 0.03)
        costs.record(requests, width, context, 10 * ms if k % 40 == 39 else ms)
    for requests in (2, 12):
        expected = [linear_ms(requests, width, 3000) for width in range(1, BLOCK + 1)]
        assert costs.step_ms(requests, 3000) == pytest.approx(expected, rel=0.08)
    json.dumps(costs.snapshot())


def test_costs_are_equal_until_enough_widths_were_seen() -> None:
    costs = LearntCosts(BLOCK)
    for k in range(20):
        costs.record(1, 1 + k % 2, 100, 5.0 + k % 2)
    assert len(set(costs.step_ms(1, 100))) == 1
    costs.record(1, 8, 100, 12.0)
    ms = costs.step_ms(1, 100)
    assert ms[0] < ms[1] < ms[7]


def test_no_row_is_taken_to_save_time() -> None:
    costs = LearntCosts(BLOCK)
    for k in range(40):
        costs.record(4, (2, 4, 8)[k % 3], 100, (12.0, 11.0, 10.0)[k % 3])
    assert (np.diff(costs.step_ms(4, 100)) >= 0).all()


def test_one_repeated_step_does_not_disturb_what_was_learnt() -> None:
    costs = LearntCosts(BLOCK)
    for k in range(400):
        requests, width = 1 + k % 7, (1, 4, 8, 16)[k % 4]
        costs.record(requests, width, 100, linear_ms(requests, width, 100))
    for _ in range(2000):
        costs.record(4, 8, 100, linear_ms(4, 8, 100))
    expected = [linear_ms(4, width, 100) for width in range(1, BLOCK + 1)]
    assert costs.step_ms(4, 100) == pytest.approx(expected, rel=0.1)


def test_learnt_costs_share_out_as_many_rows_as_widths_have() -> None:
    costs = LearntCosts(4)
    shared = costs.shared(3)
    assert (shared.rows, shared.widths) == ([6, 9, 12], [4, 4, 4])
    assert LearntCosts(16).shared(3).widths[:4] == [4, 6, 8, 10]
    for k in range(200):
        width = 1 + k % 4
        if width == 1:
            costs.record(3, 1, 100, linear_ms(3, 1, 100))
        else:
            costs.record(3, 4, 100, linear_ms(3, width, 100), rows=3 * width)
    expected = [linear_ms(3, width, 100) for width in range(1, 5)]
    assert costs.step_ms(3, 100) == pytest.approx(expected, rel=0.05)
    assert costs.shared_ms(3, 100) == pytest.approx(expected[1:], rel=0.05)
