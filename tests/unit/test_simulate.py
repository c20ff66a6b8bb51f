"""Simulated acceptance: the lengths that are drawn, and what they do not depend on."""

from __future__ import annotations

import time

import numpy as np
import pytest

from sglang_dflash import simulate
from sglang_dflash.simulate import (
    RECORDED_SURVIVAL,
    DrawnAcceptance,
    SteadyAcceptance,
    survival_of,
)


def drawn(ids: list[str], steps: int, width: int = 16) -> np.ndarray:
    """Return the correct drafts of the first steps, [steps, requests]."""
    source = DrawnAcceptance()
    return np.array([source.num_correct(len(ids), width, ids) for _ in range(steps)])


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
        lengths.append(both.num_correct(len(here), 16, here)[here.index("accept8-a")])
    assert lengths == [alone.num_correct(1, 16, ["accept8-a"])[0] for _ in range(50)]


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
        assert source.num_correct(2, 16, ids)[1] == alone.num_correct(1, 16, ["accept8-a"])[0]
    assert len(source._rows) <= 8


@pytest.mark.parametrize("name", ["accept99", "acceptfoo", "accept", "accept0.5", "accept4.2b"])
def test_a_bad_accept_length_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*from 1 to 16.*such as accept4.2-1"):
        DrawnAcceptance().num_correct(1, 16, [f"{name}-x"])


def test_survival_has_a_place_per_draft() -> None:
    for block_size in (2, 8, 16, 32):
        for name in ("recorded", "accept1.5"):
            assert survival_of(name, block_size).shape == (block_size - 1,)


def test_a_step_of_many_requests_draws_fast() -> None:
    """Draws happen on the host within the step; about 10 us here, and a loaded machine has time."""
    ids = [f"accept{2 + 6 * (i % 2)}-{i}" for i in range(256)]
    source = DrawnAcceptance()
    source.num_correct(256, 16, ids)
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        source.num_correct(256, 16, list(ids))
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 100e-6


def test_steady_lengths_are_met_on_average_and_equal_for_all() -> None:
    source = SteadyAcceptance(4.2)
    steps = [source.num_correct(3, 16, ["a", "b", "c"]) for _ in range(100)]
    assert all(len(set(step)) == 1 and len(step) == 3 for step in steps)
    assert sum(step[0] + 1 for step in steps) == 420


@pytest.mark.parametrize("length", [0.3, 1.0, 2.5, 7.9, 99.0])
def test_steady_lengths_do_not_depend_on_the_width(length: float) -> None:
    mixed, full = SteadyAcceptance(length), SteadyAcceptance(length)
    for width in [16, 1, 4, 2, 8, 16, 3] * 3:
        wanted = min(full.num_correct(1, 16, ["a"])[0], width - 1)
        assert mixed.num_correct(1, width, ["a"]) == [wanted]
