"""What the drafter's confidences say: the survival of each draft, and the tokens that rows buy.

A draft's confidence is the peak of the drafter's distribution at its position, never the
probability of the drawn token (see sglang_dflash/width.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]

# beyond these a confidence says no more
LEAST_CONFIDENCE, MOST_CONFIDENCE = 1e-6, 1 - 1e-6
# a greedy target accepts more than the peak promises: +0.75 in the logit with the drafter tried
START_OFFSET, START_SLOPE = 0.5, 1.0
LARGEST_OFFSET = 6.0
SMALLEST_SLOPE, LARGEST_SLOPE = 0.2, 3.0
# how firmly all positions together are held to the start, and each to all: the inverse variances of
# offset and slope. An attempt tells about 0.2, so a position is its own after about 100 of them,
# and all together leave the start after a few, as they must after a probe
START_PRECISION, POSITION_PRECISION = (1.0, 4.0), (16.0, 16.0)
# outcomes are remembered for this many steps of a batch, or of one request if there are few
CALIBRATION_STEPS, CALIBRATION_REQUEST_STEPS = 64, 256
# outcomes contradict the fit when, over this many steps or those of one request, they are off by so
# many standard deviations and by so large a share; then next to nothing of the evidence is kept
SURPRISE_STEPS, SURPRISE_REQUEST_STEPS = 4, 16
SURPRISE_DEVIATIONS, SURPRISE_SHARE, SURPRISE_ATTEMPTS = 5.0, 0.2, 2.0
# the fit is renewed when this share of its evidence is new
NEW_SHARE = 0.1
# Newton steps of one fit, how far they may go, and the change that ends them: far from the optimum
# a step overshoots
MOST_FIT_STEPS, FARTHEST_OFFSET, FARTHEST_SLOPE, SETTLED = 12, 1.0, 0.25, 0.01
# outcomes are counted in bins of this width in the logit, from the smallest to the largest
BIN, LARGEST_LOGIT = 0.5, 14.0
BINS = round(2 * LARGEST_LOGIT / BIN)

# the curve is remembered for this many steps of a batch, or of one request if there are few
CURVE_STEPS, CURVE_REQUEST_STEPS = 16, 32
# points of the curve per row, and survivals told apart
POINTS_PER_ROW, LEVELS = 4, 64


class Calibration:
    """The probability that a draft is correct, given its confidence and correct ones before it.

    sigmoid(offset + slope * logit(confidence)) by position. Which drafts are attempted depends on
    confidences alone, so outcomes given the confidence are unbiased. They are counted in bins of
    the logit, decayed, and fitted by a regularised logistic regression. When they contradict the
    fit, the drafter meets other text: what was learnt before is dropped, rather than outlived.
    """

    def __init__(self, block_size: int) -> None:
        self.offsets: Floats32 = np.full(block_size - 1, START_OFFSET, dtype=np.float32)
        self.slopes: Floats32 = np.full(block_size - 1, START_SLOPE, dtype=np.float32)
        self.version = 0
        # [offset or slope, position], the last position for all together
        self._fitted = np.array([[START_OFFSET], [START_SLOPE]]).repeat(block_size, axis=1)
        # [successes or failures, position, bin], of the drafts that were attempted
        self._counts = np.zeros((2, block_size - 1, BINS))
        logits = (np.arange(BINS) + 0.5) * BIN - LARGEST_LOGIT
        self._powers = np.stack((np.ones(BINS), logits, logits**2), axis=1)
        self._positions = np.arange(block_size - 1)
        self._first_bins = self._positions * BINS
        self._evidence = self._new = 0.0
        self.surprises = 0
        # decayed: attempts, successes beyond those expected, and the variance of that
        self._attempts = self._excess = self._variance = 0.0

    def record(self, confidence: ArrayLike, rows: ArrayLike, num_correct: ArrayLike) -> Floats32:
        """Learn from a step: [b, D] confidences, [b] rows with the anchor's, [b] correct drafts.

        Return what `survival` returns from then on.
        """
        logits = _logits(confidence)
        requests, drafts = logits.shape
        if requests and drafts:
            verified = np.minimum(np.asarray(rows) - 1, drafts)
            correct = np.minimum(num_correct, verified)
            bins = ((logits + LARGEST_LOGIT) * (1 / BIN)).astype(np.intp)
            bins += self._first_bins[:drafts]
            # the first draft that is not correct was attempted, those behind it were not
            (failed,) = (correct < verified).nonzero()
            is_attempted = self._positions[:drafts] < correct[:, None]
            successes, failures = bins[is_attempted], bins[failed, correct[failed]]
            is_attempted[failed, correct[failed]] = True
            self._compare(logits, is_attempted, len(successes))
            self._scale(1 - 1 / max(CALIBRATION_STEPS, CALIBRATION_REQUEST_STEPS / requests))
            for counts, outcomes in zip(self._counts, (successes, failures), strict=True):
                counts += np.bincount(outcomes, minlength=counts.size).reshape(counts.shape)
                self._evidence += len(outcomes)
                self._new += len(outcomes)
            if self._new > NEW_SHARE * self._evidence:
                self._fit()
        return self._survival(logits)

    def _compare(self, logits: Floats32, is_attempted: NDArray[np.bool_], num_correct: int) -> None:
        """Compare a step's outcomes with the fit, and drop the evidence if they contradict it."""
        requests, drafts = logits.shape
        fitted = (self.offsets[:drafts] + self.slopes[:drafts] * logits)[is_attempted]
        rates = 1 / (1 + np.exp(-fitted))
        expected = float(rates.sum())
        kept = 1 - 1 / max(SURPRISE_STEPS, SURPRISE_REQUEST_STEPS / requests)
        self._attempts = kept * self._attempts + len(rates)
        self._excess = kept * self._excess + num_correct - expected
        self._variance = kept * self._variance + expected - float(np.vdot(rates, rates))
        # one more for the rates themselves: they are estimates
        deviations = abs(self._excess) / (1 + self._variance) ** 0.5
        if deviations > SURPRISE_DEVIATIONS and abs(self._excess) > SURPRISE_SHARE * self._attempts:
            self.surprises += 1
            self.forget(SURPRISE_ATTEMPTS)
            self._attempts = self._excess = self._variance = 0.0

    def forget(self, attempts: float) -> None:
        """Keep what was found, but only as much evidence as this many attempts."""
        if self._evidence > attempts:
            self._scale(attempts / self._evidence)

    def survival(self, confidence: ArrayLike) -> Floats32:
        """Return [b, D]: the probability that a draft and all before it are correct."""
        return self._survival(_logits(confidence))

    def _survival(self, logits: Floats32) -> Floats32:
        """Return the survival in the array that held the logits."""
        drafts = logits.shape[1]
        logits *= -self.slopes[:drafts]
        logits -= self.offsets[:drafts]
        np.exp(logits, out=logits)
        logits += 1
        np.reciprocal(logits, out=logits)
        return np.multiply.accumulate(logits, axis=1)

    def _scale(self, share: float) -> None:
        self._counts *= share
        self._evidence *= share
        self._new *= share

    def _fit(self) -> None:
        """Fit all positions together, drawn to the start, and each one, drawn to all together."""
        self._new = 0.0
        successes, failures = np.concatenate(
            (self._counts, self._counts.sum(axis=1, keepdims=True)), axis=1
        )
        attempts = successes + failures
        precision = np.array([POSITION_PRECISION]).T.repeat(len(attempts), axis=1)
        precision[:, -1] = START_PRECISION
        for _ in range(MOST_FIT_STEPS):
            before = self._fitted.copy()
            centre = before[:, -1:].repeat(len(attempts), axis=1)
            centre[:, -1] = START_OFFSET, START_SLOPE
            correct = 1 / (1 + np.exp(-before.T @ self._powers[:, :2].T))
            expected = attempts * correct
            slope_of = ((successes - expected) @ self._powers[:, :2]).T
            slope_of -= precision * (before - centre)
            both, cross, squares = ((expected - expected * correct) @ self._powers).T
            both, squares = both + precision[0], squares + precision[1]
            determinant = both * squares - cross**2
            step = np.stack(
                (
                    (squares * slope_of[0] - cross * slope_of[1]) / determinant,
                    (both * slope_of[1] - cross * slope_of[0]) / determinant,
                )
            )
            offsets = before[0] + step[0].clip(-FARTHEST_OFFSET, FARTHEST_OFFSET)
            slopes = before[1] + step[1].clip(-FARTHEST_SLOPE, FARTHEST_SLOPE)
            self._fitted[0] = offsets.clip(-LARGEST_OFFSET, LARGEST_OFFSET)
            self._fitted[1] = slopes.clip(SMALLEST_SLOPE, LARGEST_SLOPE)
            if np.abs(self._fitted - before).max() < SETTLED:
                break
        self.offsets, self.slopes = self._fitted[:, :-1].astype(np.float32)
        self.version += 1


class RowCurve:
    """Tokens that a request is expected to commit, by the rows of a batch that shares them out.

    For each step the best drafts of the batch are taken in the order of their survival; the mean of
    the last steps is kept on a grid of extra rows per request, for each limit to a request's rows.
    """

    def __init__(self, block_size: int) -> None:
        # even limits, and the block's size
        self._limits = np.unique([*range(2, block_size, 2), block_size])
        # [limit, point]; all limits are sought on one axis, each in a part of its own
        points = np.arange(POINTS_PER_ROW * (block_size - 1) + 1) / POINTS_PER_ROW
        self._apart = np.arange(len(self._limits))[:, None] * (2.0 * block_size)
        self._sought = np.minimum(points, self._limits[:, None] - 1) + self._apart
        self._sums = np.zeros(self._sought.shape)
        self._weight = 0.0
        self._mean: Floats | None = None
        self._first_levels = np.arange(block_size - 1) * LEVELS

    def record(self, survival: NDArray[np.floating]) -> None:
        """Count a step: the [b, B - 1] survival of every draft, falling along a request."""
        requests, drafts = survival.shape
        if not requests:
            return
        # counted by levels, as sorting takes longer; the first level is above every survival
        levels = ((LEVELS - 1) - survival * (LEVELS - 2)).astype(np.intp)
        levels += self._first_levels
        flat = levels.ravel()
        found = np.empty((2, drafts, LEVELS))
        for counts, weights in zip(found, (None, survival.ravel()), strict=True):
            counts[:] = np.bincount(flat, weights, counts.size).reshape(counts.shape)
        # [drafts or tokens, limit, level]: of the drafts before the limit down to the level
        found = found.cumsum(axis=1)[:, self._limits - 2].cumsum(axis=2) / requests
        decay = 1 - 1 / max(CURVE_STEPS, CURVE_REQUEST_STEPS / requests)
        self._weight = decay * self._weight + 1
        self._sums *= decay
        rows, tokens = found
        rows += self._apart
        self._sums += np.interp(self._sought, rows.ravel(), tokens.ravel())
        self._mean = 1 + self._sums / self._weight

    def keep(self, share: float) -> None:
        """Keep the curve, but only this share of its weight."""
        self._weight *= share
        self._sums *= share

    def tokens(self, extra: ArrayLike, widest: ArrayLike | None = None) -> Floats | None:
        """Return the tokens of a request where the batch has so many rows per request beyond the
        anchor's, and no request more than `widest` in all; None before any step."""
        if self._mean is None:
            return None
        place = np.asarray(extra, dtype=np.float64) * POINTS_PER_ROW
        last_point, last = self._sums.shape[1] - 1, len(self._limits) - 1
        place = np.minimum(np.maximum(place, 0), last_point)
        below = np.minimum(place.astype(np.intp), last_point - 1)
        share = place - below
        limit = (
            np.intp(last)
            if widest is None
            else np.minimum(self._limits.searchsorted(np.asarray(widest)), last)
        )
        return (1 - share) * self._mean[limit, below] + share * self._mean[limit, below + 1]


def _logits(confidence: ArrayLike) -> Floats32:
    """Return logits in a new array; fmax takes a number rather than NaN."""
    kept = np.fmax(np.asarray(confidence, dtype=np.float32), np.float32(LEAST_CONFIDENCE))
    np.minimum(kept, np.float32(MOST_CONFIDENCE), out=kept)
    return np.log(kept / (1 - kept))
