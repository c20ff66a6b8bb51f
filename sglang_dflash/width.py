"""How many drafts to verify: the width that promises most tokens per second.

Decided on the host before a step, from how drafts fared lately and what a step of each width costs.

Why the output stays exact: a width is a function of earlier steps, of what they committed and how
long they took, and of nothing that is drawn in its own step. Given the earlier steps it is a
constant, and a step is exact for every constant width. Where drafts are kept if they match, the
token after a row is the target's own choice given the tokens before it, whether or not another row
follows. Where sampled drafts are accepted or rejected, block verification of the first drafts is
exact for any number of them that was fixed before they were drawn: each committed token then has
the target's distribution given those before it. By induction over steps so has the whole text. A
cut that looked at a drawn draft would break this: dropping a draft because of what it is takes away
its share of the acceptance, which the residual distribution does not give back
(tests/unit/test_step_sampled.py shows both).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from sglang_dflash.costs import Floats, GraphCosts, LearntCosts

# acceptance is remembered for this many steps of a batch, or of one request if it is alone
MEMORY_STEPS, MEMORY_REQUEST_STEPS = 32, 64
# a position starts with the rate of the one before it, as if seen this often; the first with 0.9
PRIOR_ATTEMPTS, FIRST_RATE = 2.0, 0.9
# share of the evidence that is kept when all requests are new
LEAST_KEPT = 0.1
# what is left of the evidence when a probe looks again: about as much as the probe adds
PROBE_ATTEMPTS, PROBE_REQUESTS = 16.0, 8
LARGEST_WEIGHT = 1e6

# another width must be better by this factor
HYSTERESIS = 1.02
# seconds between probes, and the share of time that they may cost
FIRST_INTERVAL, LAST_INTERVAL, PROBE_SHARE = 1.0, 10.0, 0.01
# steps of given widths to begin with, where costs are not known
STARTING_STEPS = 12


class Acceptance:
    """Survival of drafts by position, from recent steps, whatever their width."""

    def __init__(self, block_size: int) -> None:
        # by position, of the drafts whose predecessors were all correct
        self._attempts = [0.0] * (block_size - 1)
        self._successes = [0.0] * (block_size - 1)
        # of the newest counts: growing it is cheaper than decaying all others
        self._weight = 1.0
        self._tokens: list[float] = []

    def record(self, width: int, num_correct: Sequence[int]) -> None:
        """Count one step of a batch: each request's number of correct drafts, 0 to width - 1."""
        if width < 2 or not num_correct:
            return
        requests = len(num_correct)
        self._grow(1 / (1 - 1 / max(MEMORY_STEPS, MEMORY_REQUEST_STEPS / requests)))
        # bytes count fastest; list first, because an array would hand over its memory instead
        stopped = map(bytes(list(num_correct)).count, range(width - 1))
        remaining = requests * self._weight
        for position, count in enumerate(stopped):
            self._attempts[position] += remaining
            remaining -= count * self._weight
            self._successes[position] += remaining

    def forget(self, attempts: float) -> None:
        """Keep the rates, but only as much evidence as this many attempts at the first draft."""
        if self._attempts and self._attempts[0] > attempts * self._weight:
            self._grow(self._attempts[0] / attempts / self._weight)

    def keep(self, share: float) -> None:
        """Keep the rates, but only this share of the evidence."""
        self._grow(1 / share)

    def survival(self) -> Floats:
        """Return [B - 1]: the probability that a draft and all before it are correct."""
        return np.diff(self.tokens())

    def tokens(self) -> list[float]:
        """Return [B]: the tokens that a request is expected to commit at widths 1 to B."""
        if not self._tokens:
            rate, alive, total = FIRST_RATE, 1.0, 1.0
            prior = PRIOR_ATTEMPTS * self._weight
            self._tokens = tokens = [total]
            for attempts, successes in zip(self._attempts, self._successes, strict=True):
                rate = (successes + prior * rate) / (attempts + prior)
                alive *= rate
                total += alive
                tokens.append(total)
        return self._tokens

    def _grow(self, factor: float) -> None:
        self._weight *= factor
        self._tokens = []
        if self._weight > LARGEST_WEIGHT:
            self._attempts = [count / self._weight for count in self._attempts]
            self._successes = [count / self._weight for count in self._successes]
            self._weight = 1.0


class WidthPolicy:
    """The verify width of each step, with probes that notice when drafting would pay again."""

    def __init__(
        self,
        block_size: int,
        costs: GraphCosts | LearntCosts,
        *,
        fixed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.acceptance = Acceptance(block_size)
        self.costs = costs
        self._block_size = block_size
        self._fixed = fixed
        self._clock = clock
        self._width = fixed or block_size
        self._steps = [0] * block_size
        # widths of the next steps: where costs are not known, and of a probe
        tried = (1, 4, block_size // 2, block_size)
        self._planned = [
            tried[k % 4] for k in range(STARTING_STEPS if isinstance(costs, LearntCosts) else 0)
        ]
        self._since = self._next_probe = self._next_allowed = clock()
        self._interval = FIRST_INTERVAL
        self._probes = 0

    def choose(self, requests: int, context: int, *, widest: int | None = None) -> int:
        """Return the width of the next step, at most `widest`."""
        limit = self._block_size if widest is None else min(widest, self._block_size)
        if self._fixed is not None and isinstance(self.costs, LearntCosts):
            return min(self._fixed, limit)
        # lists: arrays are slower at this size
        ms = self.costs.step_ms(requests, context)[:limit].tolist()
        if self._fixed is not None:
            self._width = min(self._fixed, max(1, sum(map(math.isfinite, ms))))
            return self._width
        if self._planned:
            return min(self._planned.pop(), max(1, sum(map(math.isfinite, ms))))
        tokens = self.acceptance.tokens()
        rates = [number / time for number, time in zip(tokens, ms, strict=False)]
        width, last = rates.index(max(rates)) + 1, self._width
        if last <= limit and rates[width - 1] < HYSTERESIS * rates[last - 1]:
            # of the widths that cost the same as the last one the widest is best
            width = limit - ms[::-1].index(ms[last - 1])
        now = self._clock()
        if (width == 1) != (self._width == 1):
            self._turn(now, is_narrow=width == 1)
        self._width = width
        if now >= self._next_probe and (probed := self._probed_width(rates)):
            # few requests are asked several times
            steps = max(1, PROBE_REQUESTS // requests) if width == 1 else 1
            self._planned = [probed] * (steps - 1)
            # the time in excess of what the best width needs for as many tokens
            lost_ms = steps * (ms[probed - 1] - tokens[probed - 1] / rates[width - 1])
            self._next_allowed = now + lost_ms / 1000 / PROBE_SHARE
            self._interval = min(2 * self._interval, LAST_INTERVAL)
            self._next_probe = max(now + self._interval, self._next_allowed)
            return probed
        return width

    def record(
        self,
        requests: int,
        width: int,
        context: int,
        ms: float | None,
        num_correct: Sequence[int],
    ) -> None:
        """Learn from a step: the drafts that were correct, and its time if that is known."""
        self._steps[width - 1] += 1
        self.acceptance.record(width, num_correct)
        if ms is not None:
            self.costs.record(requests, width, context, ms)

    def timed(self, requests: int, width: int, context: int, ms: float) -> None:
        """Learn from the time of a step, if any width is to be chosen."""
        if self._fixed is None:
            self.costs.record(requests, width, context, ms)

    def admit(self, new: int, requests: int) -> None:
        """Note that some of the requests of the next step are new: what was learnt from others says
        less about them, and at width 1 they are asked as soon as a probe is allowed."""
        self.acceptance.keep(max(LEAST_KEPT, 1 - new / requests))
        if self._width == 1:
            self._next_probe = self._next_allowed

    def expected_tokens(self, width: int) -> float:
        """Return the tokens that a request is expected to commit in a step of this width."""
        return self.acceptance.tokens()[width - 1]

    def snapshot(self) -> dict[str, object]:
        return {
            "mode": "auto" if self._fixed is None else self._fixed,
            "width": self._width,
            "expected_tokens": round(self.expected_tokens(self._width), 4),
            "survival": [round(float(share), 4) for share in self.acceptance.survival()],
            "steps_by_width": {str(k): n for k, n in enumerate(self._steps, start=1) if n},
            "costs": self.costs.snapshot(),
        }

    def _turn(self, now: float, *, is_narrow: bool) -> None:
        """Note that drafting ended or began again; after a short return, probes stay as rare."""
        if is_narrow:
            if now - self._since > self._interval:
                self._interval = FIRST_INTERVAL
            self._next_probe = max(now + self._interval, self._next_allowed)
        self._since = now

    def _probed_width(self, rates: list[float]) -> int | None:
        """Return a width that may tell something new, if there is one."""
        if self._width == 1:
            if not any(rates[1:]):
                return None
            self.acceptance.forget(PROBE_ATTEMPTS)
            return rates.index(max(rates[1:]), 1) + 1
        if isinstance(self.costs, GraphCosts):
            return None
        self._probes += 1
        neighbours = (1, self._width // 2, min(2 * self._width, len(rates)))
        return neighbours[self._probes % 3]
