"""Confidences: their calibration from outcomes, and the tokens that rows of a batch buy."""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import numpy as np
import pytest

from sglang_dflash.confidence import Calibration, RowCurve

BLOCK = 16


class Drawn(NamedTuple):
    """The drafts of a step."""

    confidence: np.ndarray  # [b, B - 1]
    survival: np.ndarray  # [b, B - 1]: true, before the outcome is drawn
    num_correct: np.ndarray  # [b], if all are verified


class Drafter:
    """Requests of given accept lengths whose drafter is too modest, by `shift` in the logit.

    Each draft's probability to be correct is drawn anew in each step, around its request's.
    """

    def __init__(self, lengths: list[float], *, shift: float = 1.2, seed: int = 5) -> None:
        self.shift = shift
        # no draft is ever correct, whatever the confidence
        self.is_wrong = False
        self._rng = np.random.default_rng(seed)
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[float]) -> None:
        self._centres = np.array([[_centre(length)] for length in lengths])

    def draw(self) -> Drawn:
        logits = self._rng.normal(self._centres, 1.5, (len(self._centres), BLOCK - 1))
        confidence = _sigmoid(logits - self.shift).astype(np.float32)
        rates = _sigmoid(logits) * (not self.is_wrong)
        right = self._rng.random(logits.shape) < rates
        correct = np.logical_and.accumulate(right, axis=1).sum(axis=1)
        return Drawn(confidence, rates.cumprod(axis=1), correct)


@functools.cache
def _centre(length: float) -> float:
    """Return the mean logit of drafts of which length - 1 are correct in the mean."""
    normal = np.random.default_rng(6).normal(0, 1.5, 4000)
    low, high = -60.0, 12.0
    for _ in range(50):
        centre = (low + high) / 2
        rate = _sigmoid(normal + centre).mean()
        is_low = (rate ** np.arange(BLOCK)).sum() < length
        low, high = (centre, high) if is_low else (low, centre)
    return centre


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def share_out(survival: np.ndarray, rows: int) -> np.ndarray:
    """Return the rows of each request: the anchor's, and those of the drafts likeliest to survive,
    as the device shares them out."""
    requests, drafts = survival.shape
    best = np.argsort(-survival, axis=None, kind="stable")[: rows - requests]
    return 1 + np.bincount(best // drafts, minlength=requests)


def verified(survival: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the survival of verified drafts, and 0 for the others."""
    return survival * (np.arange(1, survival.shape[1] + 1) < rows[:, None])


def serve(
    drafter: Drafter, steps: int, *, rows_each: float, calibration: Calibration
) -> tuple[float, float]:
    """Share out rows for some steps; return predicted and real tokens of a request and step."""
    predicted = real = 0.0
    for _ in range(steps):
        drawn = drafter.draw()
        survival = calibration.survival(drawn.confidence)
        requests = len(survival)
        rows = share_out(survival, round(rows_each * requests))
        correct = np.minimum(drawn.num_correct, rows - 1)
        predicted += 1 + verified(survival, rows).sum() / requests
        real += 1 + correct.mean()
        calibration.record(drawn.confidence, rows, correct)
    return predicted / steps, real / steps


@pytest.mark.parametrize("shift", [-1.5, 0.0, 2.0])
@pytest.mark.parametrize("rows_each", [2.0, 4.0, 10.0])
def test_calibration_finds_the_accept_length(shift: float, rows_each: float) -> None:
    drafter = Drafter([2.0] * 16 + [8.0] * 16, shift=shift)
    calibration = Calibration(BLOCK)
    serve(drafter, 300, rows_each=rows_each, calibration=calibration)
    predicted, real = serve(drafter, 200, rows_each=rows_each, calibration=calibration)
    assert predicted == pytest.approx(real, rel=0.05)
    # of all drafts, also those that were never verified
    drawn = [drafter.draw() for _ in range(100)]
    expected = np.mean([calibration.survival(step.confidence).sum(axis=1) for step in drawn])
    assert expected == pytest.approx(np.mean([step.num_correct for step in drawn]), rel=0.1)
    assert calibration.offsets[:3] == pytest.approx([shift] * 3, abs=0.6)


def test_without_calibration_the_accept_length_is_wrong() -> None:
    predicted, real = serve(
        Drafter([4.0] * 32, shift=2.0), 1, rows_each=8, calibration=Calibration(BLOCK)
    )
    assert predicted < 0.8 * real


def test_a_slope_is_found_and_kept_in_its_limits() -> None:
    rng = np.random.default_rng(7)
    for slope, expected in ((0.5, 0.5), (1.8, 1.8), (-1.0, 0.2), (9.0, 3.0)):
        calibration = Calibration(3)
        for _ in range(400):
            logits = rng.normal(0, 1, (64, 2))
            right = rng.random((64, 2)) < _sigmoid(slope * logits - 0.3)
            correct = np.logical_and.accumulate(right, axis=1).sum(axis=1)
            calibration.record(_sigmoid(logits), np.full(64, 3), correct)
        assert calibration.slopes == pytest.approx([expected] * 2, rel=0.15)
        assert np.abs(calibration.offsets + 0.3).max() < 0.25


def test_a_position_is_its_own_with_evidence_and_follows_the_others_without() -> None:
    rng = np.random.default_rng(8)
    calibration = Calibration(5)
    for _ in range(300):
        # the first is right at 0.9, the second at 0.2, and the last is never verified
        right = rng.random((32, 4)) < (0.9, 0.2, 0.5, 0.5)
        correct = np.logical_and.accumulate(right, axis=1).sum(axis=1)
        rows = np.full(32, 4)
        confidence = _sigmoid(rng.uniform(-0.5, 0.5, (32, 4)))
        calibration.record(confidence, rows, np.minimum(correct, rows - 1))
    found = calibration.survival(np.full((1, 4), 0.5))[0]
    assert found[0] == pytest.approx(0.9, abs=0.03)
    assert found[1] / found[0] == pytest.approx(0.2, abs=0.03)
    # 0.9 of 1, 0.18 of 0.9 and 0.09 of 0.18 attempts
    assert found[3] / found[2] == pytest.approx((0.9 + 0.18 + 0.09) / 2.08, abs=0.06)


def test_a_start_without_evidence() -> None:
    calibration = Calibration(4)
    found = calibration.survival(np.array([[0.5, 0.5, 0.5]]))
    rate = 1 / (1 + np.exp(-0.5))
    assert found[0] == pytest.approx([rate, rate**2, rate**3])
    assert calibration.offsets.dtype == calibration.slopes.dtype == np.float32
    calibration.record(np.full((1, 3), 0.5), np.array([4]), np.array([0]))
    assert calibration.offsets[0] > -0.5, "one outcome says little"
    assert calibration.offsets[0] < 0.5


def test_only_attempted_drafts_count() -> None:
    confidence = np.array([[0.9, 0.3, 0.6]])
    for rows, correct, changed in (
        (1, 0, [0, 0, 0]),
        (2, 1, [1, 0, 0]),
        (3, 1, [1, -1, 0]),
        (4, 0, [-1, 0, 0]),
        (4, 3, [1, 1, 1]),
    ):
        calibration = Calibration(4)
        calibration.record(confidence, np.array([rows]), np.array([correct]))
        counts = calibration._counts.sum(axis=2)
        assert (counts[0] - counts[1]).tolist() == changed
        assert counts.sum() == np.abs(changed).sum()


def test_the_version_tells_changes() -> None:
    calibration = Calibration(BLOCK)
    drafter = Drafter([4.0] * 8)
    seen = {}
    for _ in range(300):
        serve(drafter, 1, rows_each=4, calibration=calibration)
        numbers = (*calibration.offsets.tolist(), *calibration.slopes.tolist())
        assert seen.setdefault(calibration.version, numbers) == numbers
    assert 20 < calibration.version < 150, "not with every step"


def test_nothing_strange_does_harm() -> None:
    rng = np.random.default_rng(9)
    calibration = Calibration(BLOCK)
    strange = np.array([0.0, 1.0, np.nan, np.inf, -np.inf, -3.0, 2.0, 1e-30, 0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(1000):
            confidence = rng.choice(strange, (8, 15)).astype(np.float32)
            rows = rng.integers(1, 17, 8)
            correct = np.array([0] * 8) if k < 400 else rows - 1 if k < 800 else [99] * 8
            calibration.record(confidence, rows, correct)
            assert (np.abs(calibration.offsets) <= 6).all()
            assert ((calibration.slopes >= 0.2 - 1e-6) & (calibration.slopes <= 3)).all()
        calibration.record(np.zeros((0, 15)), np.zeros(0, dtype=int), np.zeros(0, dtype=int))
        survival = calibration.survival(rng.choice(strange, (8, 15)))
    assert np.isfinite(survival).all() and (survival >= 0).all() and (survival <= 1).all()
    clamped = calibration.survival(np.array([[np.nan], [0.0], [1e-6]]))
    assert len(set(clamped.ravel().tolist())) == 1


def test_what_was_forgotten_is_learnt_anew_from_little() -> None:
    confidence = np.full((16, 1), 0.8)
    rates = []
    for attempts in (16, 1e9):
        calibration = Calibration(2)
        for _ in range(300):
            calibration.record(confidence, np.full(16, 2), np.zeros(16, dtype=int))
        before, surprises = calibration.survival(confidence)[0, 0], calibration.surprises
        assert before < 0.02
        calibration.forget(attempts)
        assert calibration.survival(confidence)[0, 0] == before
        # too few to contradict what was learnt
        calibration.record(confidence, np.full(16, 2), np.arange(16) < 4)
        rates.append(calibration.survival(confidence)[0, 0])
        assert calibration.surprises == surprises
    assert rates[0] > 0.08 and rates[1] < 0.03


@pytest.mark.parametrize("turns_right", [False, True])
def test_outcomes_that_contradict_the_fit_replace_the_evidence(turns_right: bool) -> None:
    """Otherwise a drafter that meets other text would be trusted for as long as it was before."""
    confidence = np.full((16, 1), 0.8)
    calibration = Calibration(2)
    for _ in range(300):
        calibration.record(confidence, np.full(16, 2), np.full(16, int(not turns_right)))
    before = calibration.surprises
    for _ in range(4):
        calibration.record(confidence, np.full(16, 2), np.full(16, int(turns_right)))
    found = calibration.survival(confidence)[0, 0]
    assert found > 0.8 if turns_right else found < 0.2
    assert calibration.surprises == before + 1


@pytest.mark.parametrize("requests", [2, 16, 256])
def test_chance_is_no_surprise(requests: int) -> None:
    calibration = Calibration(BLOCK)
    drafter = Drafter([2.0, 8.0] * (requests // 2))
    serve(drafter, 500, rows_each=4.0, calibration=calibration)
    assert calibration.surprises == 0


@pytest.mark.parametrize("requests", [2, 8, 64])
def test_the_curve_predicts_the_tokens(requests: int) -> None:
    lengths = [2.0] * (requests // 2) + [8.0] * (requests // 2)
    drafter, curve = Drafter(lengths, shift=0.0), RowCurve(BLOCK)
    for _ in range(60):
        curve.record(drafter.draw().survival)
    for rows, widest in ((1.5, 16), (2, 4), (3, 6), (3, 16), (6.5, 16), (16, 16)):
        real = []
        for _ in range(3000 // requests):
            drawn = drafter.draw()
            survival = drawn.survival[:, : widest - 1]
            given = share_out(survival, int(rows * requests))
            real.append(1 + verified(survival, given).sum() / requests)
        found = curve.tokens([int(rows * requests) / requests - 1], [widest])
        assert found is not None
        assert found[0] == pytest.approx(np.mean(real), rel=0.12 if requests == 2 else 0.05)


def test_the_curve_of_one_step_is_exact() -> None:
    curve = RowCurve(4)
    curve.record(np.array([[0.9, 0.8, 0.1], [0.5, 0.25, 0.0]]))
    extra = [0, 0.5, 0.75, 1, 1.5, 2, 2.5, 3]
    expected = 1 + np.array([0, 0.9, 1.3, 1.7, 2.2, 2.45, 2.55, 2.55]) / 2
    assert curve.tokens(extra) == pytest.approx(expected, abs=1e-6)
    assert curve.tokens([0.5, 1, 1.5, 3], [2] * 4) == pytest.approx([1.45, 1.7, 1.7, 1.7])
    assert curve.tokens([-1, 99]) == pytest.approx([1, expected[-1]], abs=1e-6)


def test_there_is_no_curve_before_a_step() -> None:
    curve = RowCurve(4)
    assert curve.tokens([0, 1]) is None
    curve.record(np.zeros((0, 3)))
    curve.keep(0.1)
    assert curve.tokens([0, 1]) is None


@pytest.mark.parametrize(("requests", "steps"), [(1, 32), (2, 16), (64, 16)])
def test_the_curve_forgets(requests: int, steps: int) -> None:
    curve = RowCurve(2)
    for _ in range(500):
        curve.record(np.zeros((requests, 1)))
    for _ in range(steps):
        curve.record(np.ones((requests, 1)))
    assert curve.tokens([1]) == pytest.approx([2 - np.exp(-1)], abs=0.02)
    curve.keep(1 / 1000)
    assert curve.tokens([1]) == pytest.approx([2 - np.exp(-1)], abs=0.02)
    curve.record(np.zeros((requests, 1)))
    assert curve.tokens([1]) == pytest.approx([1], abs=0.03)
