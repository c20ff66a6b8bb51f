"""Simulated acceptance: the lengths and confidences that are drawn, and what they depend on."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from sglang_dflash import simulate
from sglang_dflash.simulate import (
    CONFIDENCE_SHIFT,
    RECORDED_SURVIVAL,
    DrawnAcceptance,
    SteadyAcceptance,
    survival_of,
    table_of,
)


def drawn(ids: list[str], steps: int, width: int = 16) -> np.ndarray:
    """Return the correct drafts of the first steps, [steps, requests]."""
    source = DrawnAcceptance()
    return np.array([source.draw(ids, width).num_correct for _ in range(steps)])


def drawn_blocks(profile: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths, [n], and confidences, [n, 15], of a whole table's draws."""
    source, ids = DrawnAcceptance(), [f"{profile}-a"]
    blocks = [source.draw(ids) for _ in range(simulate.DECK * simulate.DECKS)]
    lengths, confidences = zip(*blocks, strict=True)
    return np.concatenate(lengths), np.concatenate(confidences)


def asked_and_correct(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which drafts follow a correct prefix, and which are correct with it; [n, 15]."""
    places = np.arange(15)
    return places <= lengths[:, None], places < lengths[:, None]


def auc(scores: np.ndarray, correct: np.ndarray) -> float:
    """Return the share of pairs of a correct and a wrong one that scores put in order."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(len(scores))
    right = int(correct.sum())
    return (ranks[correct].sum() - right * (right - 1) / 2) / (right * (len(scores) - right))


def repaired(confidences: np.ndarray) -> np.ndarray:
    """Return the probabilities that are left when the shift is taken back."""
    odds = confidences.astype(np.float64) / (1 - confidences) * np.exp(-CONFIDENCE_SHIFT)
    return odds / (1 + odds)


@pytest.mark.parametrize("length", [1.0, 2.0, 4.2, 6.0, 8.0, 15.5, 16.0])
def test_the_mean_is_the_accept_length_in_the_id(length: float) -> None:
    ids = [f"accept{length:g}-{i}" for i in range(64)]
    assert 1 + drawn(ids, 400).mean() == pytest.approx(length, rel=1e-2)


def test_the_recorded_profile_survives_as_recorded() -> None:
    found = drawn([f"recorded-{i}" for i in range(64)], 400)
    for position, survival in enumerate(RECORDED_SURVIVAL, start=1):
        assert (found >= position).mean() == pytest.approx(survival, abs=5e-3)
    assert 1 + found.mean() == pytest.approx(3.165, rel=1e-2)
    assert 0 < (found > len(RECORDED_SURVIVAL)).mean() < RECORDED_SURVIVAL[-1]


def test_confidence_is_as_telling_as_the_recorded_one() -> None:
    """Recorded: .83, .96 and .68."""
    lengths, confidences = drawn_blocks("recorded")
    asked, correct = asked_and_correct(lengths)
    assert auc(confidences[asked], correct[asked]) == pytest.approx(0.83, abs=0.01)
    assert auc(confidences.cumprod(axis=1).ravel(), correct.ravel()) == pytest.approx(
        0.96, abs=0.01
    )
    expected = repaired(confidences).cumprod(axis=1).sum(axis=1)
    assert np.corrcoef(expected, lengths)[0, 1] == pytest.approx(0.68, abs=0.02)


@pytest.mark.parametrize("profile", ["accept2", "accept4.2", "accept8"])
def test_confidence_is_about_as_telling_at_other_lengths(profile: str) -> None:
    lengths, confidences = drawn_blocks(profile)
    asked, correct = asked_and_correct(lengths)
    assert 0.80 < auc(confidences[asked], correct[asked]) < 0.86
    expected = repaired(confidences).cumprod(axis=1).sum(axis=1)
    assert 0.60 < np.corrcoef(expected, lengths)[0, 1] < 0.75


@pytest.mark.parametrize("profile", ["recorded", "accept2", "accept4.2", "accept8"])
def test_confidence_is_too_modest_by_the_shift_and_else_right(profile: str) -> None:
    lengths, confidences = drawn_blocks(profile)
    asked, correct = asked_and_correct(lengths)
    shown, wanted = repaired(confidences)[asked], correct[asked]
    for low in np.arange(0.1, 0.9, 0.1):
        inside = (shown >= low) & (shown < low + 0.1)
        assert wanted[inside].mean() == pytest.approx(shown[inside].mean(), abs=0.03)
    # without the repair it is off by much more
    assert wanted.mean() - confidences[asked].mean() > 0.05
    assert wanted.mean() == pytest.approx(shown.mean(), abs=0.02)


def test_a_drafter_that_is_always_wrong_does_not_know_it() -> None:
    lengths, confidences = drawn_blocks("accept1")
    assert not lengths.any()
    assert confidences.mean() == pytest.approx(drawn_blocks("recorded")[1].mean(), rel=1e-2)
    assert (confidences > 0.9).mean() > 0.02


def test_a_width_only_cuts_what_a_step_draws() -> None:
    ids = ["accept8-a", "recorded-b"]
    cut, source = DrawnAcceptance(), DrawnAcceptance()
    for _ in range(20):
        lengths, confidences = source.draw(ids)
        assert lengths.shape == (2,) and lengths.dtype == np.int64
        assert confidences.shape == (2, 15) and confidences.dtype == np.float32
        narrow = cut.draw(ids, 4)
        assert narrow.num_correct.tolist() == lengths.clip(max=3).tolist()
        assert (narrow.confidence == confidences).all()


def test_another_process_draws_the_same() -> None:
    """Ranks agree without communication: nothing may depend on a process's state or hash seed."""
    ask = "print([part.tolist() for part in DrawnAcceptance().draw(['accept8-a', 'recorded-b'])])"
    code = f"from sglang_dflash.simulate import DrawnAcceptance; {ask}"
    found = {
        subprocess.check_output(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, text=True
        )
        for seed in ("1", "2")
    }
    here = [part.tolist() for part in DrawnAcceptance().draw(["accept8-a", "recorded-b"])]
    assert found == {f"{here}\n"}


def test_what_is_drawn_may_be_changed() -> None:
    first, second = DrawnAcceptance(), DrawnAcceptance()
    for part in first.draw(["accept8-a"]):
        part[:] = 0
    again = [first.draw(["accept8-a"]), second.draw(["accept8-a"]) and second.draw(["accept8-a"])]
    assert (again[0][1] == again[1][1]).all() and (again[0][1] > 0).all()


@pytest.mark.parametrize("block_size", [2, 8, 16, 32])
def test_a_table_is_small_and_soon_made(block_size: int) -> None:
    table_of.cache_clear()
    began = time.thread_time()  # a loaded machine has time
    table = table_of("accept1.9", block_size)
    assert time.thread_time() - began < 1
    assert table.confidences.shape[1] == block_size - 1
    assert sum(part.nbytes for part in table) < 40e6
    assert 1 + table.lengths.mean() == pytest.approx(1.9, rel=1e-2)


@pytest.mark.parametrize("other", ["", "8f3c-1", "a", "-accept2"])
def test_an_id_without_a_profile_has_the_recorded_one(other: str) -> None:
    """A server's own health checks have ids of their own and must not fail."""
    assert 1 + drawn([other], 20_000).mean() == pytest.approx(3.165, rel=1e-2)


def test_requests_of_one_batch_have_their_own_profiles() -> None:
    means = 1 + drawn(["accept2-a", "accept8-a", "accept1-a"], 20_000).mean(axis=0)
    assert means.tolist() == pytest.approx([2, 8, 1], rel=1e-2)


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_a_width_only_cuts_what_is_drawn(width: int) -> None:
    """If draws depended on the width, two widths could not be compared on the same luck."""
    ids = ["accept8-a", "accept2-b", "recorded-c"]
    assert (drawn(ids, 200, width) == drawn(ids, 200).clip(max=width - 1)).all()


def test_a_draw_depends_on_the_request_and_its_step_only() -> None:
    """Otherwise ranks with other batches, or a run with another load, would draw differently."""
    alone, both = DrawnAcceptance(), DrawnAcceptance()
    lengths = []
    for step in range(50):
        here = ["accept2-x", "accept8-a"] if step % 3 else ["accept8-a", "accept4-y", "recorded-z"]
        lengths.append(both.draw(here).num_correct[here.index("accept8-a")])
    assert lengths == [alone.draw(["accept8-a"]).num_correct[0] for _ in range(50)]


def test_two_requests_of_a_profile_draw_differently() -> None:
    found = drawn(["accept8-a", "accept8-b"], 100)
    assert (found[:, 0] != found[:, 1]).mean() > 0.5


def test_a_few_draws_are_close_to_the_mean() -> None:
    """A window of seconds holds few draws of one request; independent ones are 5 % off here."""
    assert 1 + drawn(["accept8-a"], 200).mean() == pytest.approx(8, rel=2e-2)


def test_finished_requests_are_forgotten_and_running_ones_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulate, "KEPT_REQUESTS", 8)
    source, alone = DrawnAcceptance(), DrawnAcceptance()
    for step in range(100):
        ids = [f"accept2-{step}", "accept8-a"]
        assert source.draw(ids).num_correct[1] == alone.draw(["accept8-a"]).num_correct[0]
    assert len(source._rows) <= 8


@pytest.mark.parametrize("name", ["accept99", "acceptfoo", "accept", "accept0.5", "accept4.2b"])
def test_a_bad_accept_length_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*from 1 to 16.*such as accept4.2-1"):
        DrawnAcceptance().draw([f"{name}-x"])


def test_survival_has_a_place_per_draft() -> None:
    for block_size in (2, 8, 16, 32):
        for name in ("recorded", "accept1.5"):
            assert survival_of(name, block_size).shape == (block_size - 1,)


def test_a_step_of_many_requests_draws_fast() -> None:
    """Draws happen on the host within the step; about 20 us here, and a loaded machine has time."""
    ids = [f"accept{2 + 6 * (i % 2)}-{i}" for i in range(256)]
    source = DrawnAcceptance()
    source.draw(ids)
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        source.draw(list(ids))
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 100e-6


def test_steady_lengths_are_met_on_average_and_equal_for_all() -> None:
    source = SteadyAcceptance(4.2)
    steps = [source.draw(["a", "b", "c"], 16).num_correct for _ in range(100)]
    assert all(len(set(step)) == 1 and len(step) == 3 for step in steps)
    assert sum(step[0] + 1 for step in steps) == 420


@pytest.mark.parametrize("length", [0.3, 1.0, 2.5, 7.9, 99.0])
def test_steady_lengths_do_not_depend_on_the_width(length: float) -> None:
    mixed, full = SteadyAcceptance(length), SteadyAcceptance(length)
    for width in [16, 1, 4, 2, 8, 16, 3] * 3:
        wanted = min(full.draw(["a"], 16).num_correct[0], width - 1)
        step = mixed.draw(["a"], width)
        assert step.num_correct.tolist() == [wanted] and step.confidence is None
