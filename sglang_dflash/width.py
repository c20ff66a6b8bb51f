"""How many drafts to verify: the width that promises most tokens per second.

Decided on the host before a step, from how drafts fared lately and what a step of each width costs.
Where a batch can share rows out, the host decides on their number, and the device gives them to the
drafts that the drafter is most confident of.

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

Where rows are shared out, a request's number of rows also looks at the drafter's confidences of its
own step, those of the other requests included. They are functions of the drafter's distributions,
which the drafter computes for all positions in one pass before any draft is drawn. So they depend
on no random number of the step: given the earlier steps and the drafter's pass the number of rows
is a constant, and the same argument holds. The confidence must therefore be the peak of the
distribution, and never the probability of the token that was drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sglang_dflash.confidence import SURPRISE_ATTEMPTS, Calibration, RowCurve
from sglang_dflash.costs import Floats, GraphCosts, LearntCosts
from sglang_dflash.host_times import ENOUGH_STEPS
from sglang_dflash.survival import Acceptance, SharedSteps

# share of the evidence that is kept when all requests are new
LEAST_KEPT = 0.1
# requests that a probe asks, by several steps if there are fewer
PROBE_REQUESTS = 8
# where rows are shared out: drafts that a probe verifies, and what is left of the curve, next to
# nothing, as a probe shows the confidences of all requests. So it is when outcomes contradict what
# was learnt
PROBE_DRAFTS, PROBE_KEPT = 16, 1 / 256

# another width must be better by this factor, unless it is a smaller one where rows are shared out
HYSTERESIS = 1.02
# of steps that share rows out the smallest is taken that is this close to the best
TIE = 1.005
# where steps without drafts promise nearly as much, so many of them are timed, once for each graph:
# what they cost must not be inferred from steps that draft
NEARLY, TIMED_STEPS = 0.85, 8
# where the device waits for the host, whose time changes slowly, a choice is kept for so many
# passes: making it takes time of the host's
HELD_PASSES = 8
# passes of a step without drafts where the host sets the pace: so many tokens share what it does
# once a step, as SGLang's scheduler does. A request that stops leaves half of them unused on
# average, and with overlap those of the step after it. So it must promise this much more to begin,
# and be measured to bring it
PASSES, REPEATED_GAIN = 8, 1.1
# while several passes run nothing is learnt of drafts, and they fare worst at the beginning of a
# text: so the passes must promise this much more than drafting
DRAFTS_AHEAD = 1.15
# steps of a probe from there: the wait behind the first one is not its own. The first probes also
# learn what drafting takes the host
REPEATED_PROBE, FIRST_REPEATED_PROBE = 2, 1 + ENOUGH_STEPS
# steps of given widths to begin with, where costs are not known
STARTING_STEPS = 12


class Probes(NamedTuple):
    """How often steps without drafts are interrupted by some with drafts."""

    first: float  # seconds between them, doubled from probe to probe
    last: float
    share: float  # of the time, which they may cost
    # what is left of the evidence when one begins: about as much as it adds
    attempts: float


PROBES = Probes(first=1.0, last=10.0, share=0.01, attempts=16.0)
REPEATED_PROBES = Probes(first=0.05, last=1.0, share=0.03, attempts=6.0)


class Choice(NamedTuple):
    """What a step verifies."""

    width: int  # the most rows of one request
    rows: int | None = None  # of the whole batch, to share out; None: each request has `width`
    passes: int = 1  # of one row per request each, without drafts; otherwise there is one


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
        self.calibration = Calibration(block_size)
        self.curve = RowCurve(block_size)
        self.costs = costs
        self._block_size = block_size
        self._fixed = fixed
        self._clock = clock
        self._widths = [Choice(width) for width in range(1, block_size + 1)]
        self._last, self._requests = Choice(fixed or block_size), 1
        self._held, self._held_for = 0, (0, False, False)
        # whether blocks of one width ran since rows were last shared out
        self._is_curve_old = False
        self._steps = [0] * block_size
        self._shared = SharedSteps()
        # the next steps: where costs are not known, and of a probe
        tried = (1, 4, block_size // 2, block_size)
        self._planned = [
            Choice(tried[k % 4])
            for k in range(STARTING_STEPS if isinstance(costs, LearntCosts) else 0)
        ]
        self._since = self._next_probe = self._next_allowed = clock()
        self._interval = PROBES.first
        self._probes = 0
        self._repeats_gain = False  # whether several passes run and were measured to gain enough
        self._timed_without: set[int] = set()  # rows of graphs that took steps without drafts

    def choose(
        self, requests: int, context: int, *, may_share: bool = False, may_repeat: bool = False
    ) -> Choice:
        """Return the width of the next step; `may_share`: its rows can be shared out, `may_repeat`:
        it can have several passes."""
        if self._fixed is not None and isinstance(self.costs, LearntCosts):
            return Choice(self._fixed)
        if self._held and self._held_for == (requests, may_share, may_repeat):
            self._held -= 1
            return self._last
        # lists: arrays are slower at this size
        ms = self.costs.step_ms(requests, context).tolist()
        widest = max(1, sum(map(math.isfinite, ms)))
        self._requests = requests
        if self._fixed is not None:
            self._last = Choice(min(self._fixed, widest))
            return self._last
        choices, tokens = self._widths, self.acceptance.tokens()
        if is_shared := may_share and requests > 1 and bool(self.costs.shared(requests).rows):
            choices, tokens, ms = self._shared_choices(requests, context, ms)
        if may_repeat:
            choices, tokens, ms = self._with_repeated(requests, context, choices, tokens, ms)
        if self._planned:
            planned = self._planned.pop()
            if planned.rows is None:
                return Choice(min(planned.width, widest))
            if planned in choices:
                return planned
        rates = [number / time for number, time in zip(tokens, ms, strict=True)]
        if choices[0].passes > 1:
            rates[0] /= DRAFTS_AHEAD
        place, best = 0, max(rates)
        while rates[place] * (TIE if is_shared else 1) < best:
            place += 1
        last = self._nearest(choices, requests)
        is_smaller = bool(choices[last].rows) and 0 < place < last and rates[place] > rates[last]
        if rates[place] < HYSTERESIS * rates[last] and not is_smaller:
            # of those that cost the same as the last one the widest is best
            place = len(ms) - 1 - ms[::-1].index(ms[last])
        now = self._clock()
        has_turned = (place == 0) != (self._last.width == 1)
        self._last = choices[place]
        if has_turned:
            self._turn(now)
        if place and rates[0] > NEARLY * rates[place] and self._is_untimed(requests):
            self._planned = [self._widths[0]] * (TIMED_STEPS - 1)
            return self._widths[0]
        probed = None
        if now >= self._next_probe:
            probed = self._probed(place, choices, rates, requests)
        if probed is not None:
            # a step's time in excess of what the best choice needs for as many tokens
            lost_ms = ms[probed] - tokens[probed] * ms[place] / tokens[place]
            self._begin_probe(choices[probed], requests, now, lost_ms)
            return choices[probed]
        if self.costs.waits_for_host(requests):
            self._held = HELD_PASSES // self._last.passes
            self._held_for = requests, may_share, may_repeat
        return choices[place]

    def record(self, width: int, num_correct: Sequence[int]) -> None:
        """Learn from a step of one width: each request's number of correct drafts."""
        self._steps[width - 1] += 1
        self._is_curve_old |= width > 1
        self.acceptance.record(width, num_correct)

    def record_shared(self, rows: ArrayLike, confidence: ArrayLike, num_correct: ArrayLike) -> None:
        """Learn from a step whose rows were shared out: each request's rows and number of correct
        drafts, [b], and the confidence of all its drafts, verified or not, [b, D]."""
        rows = np.asarray(rows)
        surprises = self.calibration.surprises
        survival = self.calibration.record(confidence, rows, num_correct)
        if self.calibration.surprises > surprises:
            self.acceptance.forget(PROBES.attempts)
            self.curve.keep(PROBE_KEPT)
        requests, drafts = survival.shape
        if not requests:
            return
        self._is_curve_old = False
        self._shared.record(rows, survival, num_correct)
        self.acceptance.expect(survival)
        if drafts < self._block_size - 1:
            # drafts without a confidence fare as those of a request that came as far do
            alive = self.acceptance.survival()
            beyond = (alive[drafts:] / max(alive[drafts - 1], 1e-9)).astype(np.float32)
            survival = np.concatenate((survival, survival[:, -1:] * beyond), axis=1)
        self.curve.record(survival)

    def timed(
        self,
        requests: int,
        choice: Choice,
        context: int,
        ms: float,
        idle_ms: float | None = None,
    ) -> None:
        """Learn from the device's time of a step, and of its wait for the next one, if any width is
        to be chosen."""
        if self._fixed is None:
            self.costs.record(
                requests, choice.width, context, ms, choice.rows, idle_ms, passes=choice.passes
            )

    def admit(self, new: int, requests: int) -> None:
        """Note that some of the requests of the next step are new: what was learnt from others says
        less about them, and at width 1 they are asked as soon as a probe is allowed."""
        share = max(LEAST_KEPT, 1 - new / requests)
        self.acceptance.keep(share)
        self.curve.keep(share)
        self._held = 0
        if self._last.width == 1:
            self._interval = self._probing.first
            self._next_probe = self._next_allowed

    def expected_tokens(self, choice: Choice, requests: int) -> float:
        """Return the tokens that a request is expected to commit in such a step."""
        if choice.rows is None:
            return choice.passes * self.acceptance.tokens()[choice.width - 1]
        extra = np.array([choice.rows / requests - 1])
        return float(self._shared_tokens(extra, [choice.width])[0])

    def snapshot(self) -> dict[str, object]:
        return {
            "mode": "auto" if self._fixed is None else self._fixed,
            "width": self._last.width,
            "passes": self._last.passes,
            "expected_tokens": round(self.expected_tokens(self._last, self._requests), 4),
            "survival": [round(float(share), 4) for share in self.acceptance.survival()],
            "steps_by_width": {str(k): n for k, n in enumerate(self._steps, start=1) if n},
            "shared": {
                **self._shared.snapshot(),
                "offsets": [round(float(offset), 3) for offset in self.calibration.offsets],
                "slopes": [round(float(slope), 3) for slope in self.calibration.slopes],
            },
            "costs": self.costs.snapshot(),
        }

    def _shared_choices(
        self, requests: int, context: int, ms: list[float]
    ) -> tuple[list[Choice], list[float], list[float]]:
        """Return no drafting and all steps that share rows out, with their tokens and ms, given the
        ms of each width. Where the host sets the pace, also equal widths, as far as a graph holds
        them: they take it less time than as many rows that are shared out."""
        rows, widths, extra = self.costs.shared(requests)
        choices = [self._widths[0], *map(Choice, widths, rows)]
        tokens = [1.0, *self._shared_tokens(extra, widths).tolist()]
        found = [ms[0], *self.costs.shared_ms(requests, context).tolist()]
        if self.costs.waits_for_host(requests):
            equal = slice(1, sum(map(math.isfinite, ms)))
            choices += self._widths[equal]
            tokens += self.acceptance.tokens()[equal]
            found += ms[equal]
        return choices, tokens, found

    def _with_repeated(
        self,
        requests: int,
        context: int,
        choices: list[Choice],
        tokens: list[float],
        ms: list[float],
    ) -> tuple[list[Choice], list[float], list[float]]:
        """Return the choices with several passes in place of the one without drafts, if so more
        tokens a second are promised."""
        passes = min(PASSES, self._block_size)
        took = self.costs.repeated_ms(requests, context, passes)
        least = 1.0 if self._repeats_gain and self._last.passes > 1 else REPEATED_GAIN
        is_better = passes * ms[0] > least * took
        self._repeats_gain = is_better and self.costs.knows_repeated(requests)
        if not is_better:
            return choices, tokens, ms
        repeated = Choice(1, passes=passes)
        return [repeated, *choices[1:]], [float(passes), *tokens[1:]], [took, *ms[1:]]

    def _shared_tokens(self, extra: Floats, widths: Sequence[int]) -> Floats:
        """Return the tokens by the mean of extra rows and the most rows of a request."""
        tokens = self.curve.tokens(extra, widths)
        if tokens is None:
            # as if each request had the mean
            tokens = np.interp(extra, np.arange(self._block_size), self.acceptance.tokens())
        elif self._is_curve_old:
            # its shape is kept, but what full blocks commit is known better
            full = self.curve.tokens([self._block_size - 1.0])
            assert full is not None
            known = self.acceptance.tokens()[-1] - 1
            tokens = 1 + (tokens - 1) * (known / max(float(full[0]) - 1, 1e-9))
        return tokens

    def _is_untimed(self, requests: int) -> bool:
        """Return whether steps without drafts were never timed on purpose at this load, and note
        that they are now."""
        if not isinstance(self.costs, GraphCosts):
            return False
        rows = self.costs.rows_without_drafts(requests)
        is_new = rows not in self._timed_without
        self._timed_without.add(rows)
        return is_new

    def _nearest(self, choices: list[Choice], requests: int) -> int:
        """Return the place of the last choice, or of that with the nearest number of rows."""
        if self._last.width == 1:
            return 0
        if self._last in choices:
            return choices.index(self._last)
        rows = self._last.rows or self._last.width * requests
        far = [abs((other.rows or other.width * requests) - rows) for other in choices[1:]]
        return 1 + far.index(min(far))

    def _turn(self, now: float) -> None:
        """Note that drafting ended or began again; after a short return, probes stay as rare."""
        if self._last.width == 1:
            if now - self._since > self._interval:
                self._interval = self._probing.first
            self._next_probe = max(now + self._interval, self._next_allowed)
        self._since = now

    @property
    def _probing(self) -> Probes:
        return REPEATED_PROBES if self._last.passes > 1 else PROBES

    def _begin_probe(self, probed: Choice, requests: int, now: float, lost_ms: float) -> None:
        """Plan the further steps of a probe, each of which loses so much time, and the next one."""
        steps = self._probe_steps(requests)
        self._planned = [probed] * (steps - 1)
        self._next_allowed = now + steps * lost_ms / 1000 / self._probing.share
        self._interval = min(2 * self._interval, self._probing.last)
        self._next_probe = max(now + self._interval, self._next_allowed)

    def _probe_steps(self, requests: int) -> int:
        """Return of how many steps a probe consists that interrupts those like the last one."""
        if self._last.width > 1:
            return 1
        # few requests are asked several times
        steps = max(1, PROBE_REQUESTS // requests)
        if self._last.passes == 1:
            return steps
        is_known = self.costs.waits_for_host(requests)
        return max(steps, REPEATED_PROBE if is_known else FIRST_REPEATED_PROBE)

    def _probed(
        self, place: int, choices: list[Choice], rates: list[float], requests: int
    ) -> int | None:
        """Return the place of a choice that may tell something new, if there is one."""
        if place == 0:
            if not any(rates[1:]):
                return None
            self.acceptance.forget(self._probing.attempts)
            if choices[-1].rows is None:
                return rates.index(max(rates[1:]), 1)
            self.calibration.forget(SURPRISE_ATTEMPTS)
            self.curve.keep(PROBE_KEPT)
            enough = (
                k
                for k, choice in enumerate(choices)
                if (choice.rows or 0) >= requests + PROBE_DRAFTS
            )
            return next(enough, len(choices) - 1)
        if isinstance(self.costs, GraphCosts):
            return None
        # learnt costs: a place for each width, shared out or not
        self._probes += 1
        width = place + 1
        return (1, width // 2, min(2 * width, len(rates)))[self._probes % 3] - 1
