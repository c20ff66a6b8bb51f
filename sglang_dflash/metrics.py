"""Acceptance meter and alarm, fed on the host by numbers that the scheduler copies anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.environment import ALARM, DEFAULT_ALARM, DEFAULT_WINDOW, Environment

# a good rate at the first draft position, a rate near chance, and a long context in tokens
GOOD_START, NEAR_CHANCE = 0.5, 0.15
LONG_CONTEXT = 4096
# the alarm judges drafts only in steps that verify at least this many rows of a request
JUDGED_WIDTH = 4
# and only if they are at least this share of a window
JUDGED_SHARE = 0.05

COUNTS = ("histogram", "accepted_at", "at_width")


@dataclass
class AcceptanceMeter:
    """Count verify steps per request: the tokens each committed and its leading correct drafts.

    Tokens after a stop are neither committed nor accepted, and prefill's token is not a step.
    """

    block_size: int
    histogram: list[int] = field(init=False)  # [k]: steps that committed k + 1 tokens
    accepted_at: list[int] = field(init=False)  # [k]: steps in which draft k + 1 was accepted
    at_width: list[int] = field(init=False)  # [k]: steps that verified k + 1 rows
    expected_tokens: float = field(default=0.0, init=False)  # committed, had all gone as expected

    def __post_init__(self) -> None:
        self.histogram = [0] * self.block_size
        self.accepted_at = [0] * (self.block_size - 1)
        self.at_width = [0] * self.block_size

    def record(
        self,
        num_correct: int,
        committed: int,
        width: int | None = None,
        expected: float = 0.0,
        *,
        times: int = 1,
    ) -> None:
        """Count a step of one request, or several alike: correct drafts, tokens committed up to a
        stop, the verify width, a full block if not given, and the tokens expected when it was
        chosen."""
        self.histogram[committed - 1] += times
        self.at_width[(width or self.block_size) - 1] += times
        self.expected_tokens += expected * times
        for position in range(min(num_correct, committed)):
            self.accepted_at[position] += times

    def since(self, earlier: AcceptanceMeter) -> AcceptanceMeter:
        """Return the counts added since `earlier` was copied."""
        found = AcceptanceMeter(self.block_size)
        for name in COUNTS:
            pairs = zip(getattr(self, name), getattr(earlier, name), strict=True)
            setattr(found, name, [now - then for now, then in pairs])
        found.expected_tokens = self.expected_tokens - earlier.expected_tokens
        return found

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Add the counts in the snapshot of another meter of the same block size."""
        for name in COUNTS:
            pairs = zip(getattr(self, name), snapshot[name], strict=True)
            setattr(self, name, [own + other for own, other in pairs])
        self.expected_tokens += snapshot["expected_tokens"]

    def copy(self) -> AcceptanceMeter:
        return self.since(AcceptanceMeter(self.block_size))

    @property
    def verify_steps(self) -> int:
        return sum(self.histogram)

    @property
    def accepted_drafts(self) -> int:
        return sum(self.accepted_at)

    @property
    def verified_rows(self) -> int:
        return sum(width * steps for width, steps in enumerate(self.at_width, start=1))

    @property
    def drafted_tokens(self) -> int:
        """Drafts that were verified."""
        return self.verified_rows - self.verify_steps

    @property
    def mean_width(self) -> float:
        """Mean verify width, or 0 before the first step."""
        steps = self.verify_steps
        return self.verified_rows / steps if steps else 0.0

    @property
    def committed_tokens(self) -> int:
        return sum(k * steps for k, steps in enumerate(self.histogram, start=1))

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per verify step, or 0 before the first one."""
        steps = self.verify_steps
        return self.committed_tokens / steps if steps else 0.0

    def position_rates(self) -> list[float]:
        """Return, for each draft position, the share of steps in which it was accepted."""
        steps = self.verify_steps
        return [count / steps if steps else 0.0 for count in self.accepted_at]

    def snapshot(self) -> dict[str, object]:
        return {
            "verify_steps": self.verify_steps,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_drafts,
            "committed_tokens": self.committed_tokens,
            "expected_tokens": round(self.expected_tokens, 2),
            "accept_length": round(self.accept_length, 4),
            "verified_rows": self.verified_rows,
            "histogram": list(self.histogram),
            "accepted_at": list(self.accepted_at),
            "at_width": list(self.at_width),
            "position_rates": [round(rate, 4) for rate in self.position_rates()],
        }

    def line(self) -> str:
        """Return one readable line: accept length and the share of steps by tokens committed."""
        steps = self.verify_steps
        shares = [
            f"{k}:{count / steps:.0%}" for k, count in enumerate(self.histogram, start=1) if count
        ]
        expected = self.expected_tokens / steps if steps else 0.0
        return (
            f"accept length {self.accept_length:.2f} (expected {expected:.2f}) of width "
            f"{self.mean_width:.1f} over {steps} steps, {' '.join(shares)}"
        )


def observe(histogram: Any, value: int, times: int) -> None:
    """Add a value so many times to a Prometheus histogram. Its own method adds one, in some
    microseconds: with thousands of steps a second, that would hold up the scheduler."""
    bucket = next(i for i, bound in enumerate(histogram._upper_bounds) if value <= bound)
    histogram._sum.inc(value * times)
    histogram._buckets[bucket].inc(times)


def replicas_of(server_info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the DFLASH state that each replica of a server reports, by name; empty if the server
    runs without our DFLASH. Replicas answer in any order."""
    found = [
        state["sglang_dflash"]
        for state in server_info["internal_states"]
        if "sglang_dflash" in state
    ]
    found.sort(key=lambda ours: ours["dp_rank"])
    return {f"dp_rank {ours['dp_rank']}": ours for ours in found}


def together(replicas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of replicas: settings, which are the same in each, and summed counts."""
    first, *_ = parts = list(replicas.values())
    meter = AcceptanceMeter(len(first["acceptance"]["histogram"]))
    for part in parts:
        meter.add(part["acceptance"])
    sums = {name: sum(part[name] for part in parts) for name in ("alarms", "free_kv_slots")}
    merged = {**first, **sums, "acceptance": meter.snapshot()}
    # a server of an earlier version reports no stages
    if all("stages" in part for part in parts):
        merged["stages"] = add_stages([part["stages"] for part in parts])
    return merged


def add_stages(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the steps and the seconds by stage of all replicas."""
    return {
        "steps": sum(part["steps"] for part in parts),
        "seconds": {
            stage: sum(part["seconds"][stage] for part in parts) for stage in parts[0]["seconds"]
        },
    }


@dataclass
class AcceptanceAlarm:
    """Warn once when acceptance stays low, and name the usual cause of such numbers.

    Warns again only after acceptance has recovered.
    """

    block_size: int
    threshold: float = DEFAULT_ALARM  # 0 turns it off
    window: int = DEFAULT_WINDOW
    raised: int = field(default=0, init=False)
    # of the window, by correct drafts, tokens committed and whether the context is long
    _steps: Counter[tuple[int, int, bool]] = field(default_factory=Counter, init=False)
    _active: bool = field(default=False, init=False)
    _seen: int = field(default=0, init=False)

    @classmethod
    def from_environment(cls, environment: Environment, block_size: int) -> AcceptanceAlarm:
        return cls(
            block_size,
            threshold=environment.alarm_threshold,
            window=environment.alarm_window,
        )

    def record(
        self, num_correct: int, committed: int, width: int, *, is_long: bool, times: int = 1
    ) -> str | None:
        """Count a step, or several alike, in a short or a long context; return a warning when one
        is due.

        A narrow step says little about the drafter: it cannot commit more than its width. A window
        with too few wider steps is not judged.
        """
        if not self.threshold:
            return None
        self._seen += times
        if width >= min(JUDGED_WIDTH, self.block_size):
            self._steps[num_correct, committed, is_long] += times
        if self._seen < self.window:
            return None
        self._seen = 0
        if self._steps.total() < JUDGED_SHARE * self.window:
            return None
        # judged once per window: a moving average would cost time at every step
        meters = {False: AcceptanceMeter(self.block_size), True: AcceptanceMeter(self.block_size)}
        whole = AcceptanceMeter(self.block_size)
        for (correct, kept, is_long), times in self._steps.items():
            meters[is_long].record(correct, kept, times=times)
            whole.record(correct, kept, times=times)
        self._steps.clear()
        was_active, self._active = self._active, whole.accept_length < self.threshold
        if not self._active or was_active:
            return None
        self.raised += 1
        return self._warning(whole, short=meters[False], long=meters[True])

    def _warning(
        self, whole: AcceptanceMeter, *, short: AcceptanceMeter, long: AcceptanceMeter
    ) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in whole.position_rates()[:8])
        return (
            f"DFLASH acceptance is low: {whole.accept_length:.2f} tokens per step over the last "
            f"{whole.verify_steps} steps, below {self.threshold:g} ({ALARM}). Accepted by draft "
            f"position: {rates} ... Likely: {likely_cause(whole, short=short, long=long)}"
        )


def likely_cause(whole: AcceptanceMeter, *, short: AcceptanceMeter, long: AcceptanceMeter) -> str:
    """Name the usual cause of these rates."""
    rates = whole.position_rates()
    if long.verify_steps and short.accept_length > 1.5 * long.accept_length:
        return (
            f"long contexts: accept length is {short.accept_length:.2f} up to {LONG_CONTEXT} "
            f"tokens and {long.accept_length:.2f} beyond. Use a drafter trained on long text."
        )
    if rates[0] < NEAR_CHANCE:
        return (
            "the drafter was trained for another target, or uses the wrong target layers or mask "
            "token. Run `python -m sglang_dflash doctor` on the pair."
        )
    if rates[0] >= GOOD_START:
        return (
            "acceptance starts high and decays fast: the text is unlike the drafter's training "
            "data, as in thinking mode or another domain. Compare with thinking off, or train a "
            "drafter on such answers."
        )
    return "the drafter is too weak for this text. Train one on the target's own answers."
