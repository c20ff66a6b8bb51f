"""How many rows each step verifies, and what the policy learns once a step's result is known.

With overlap scheduling a step is chosen before the last one's result has reached the host. Results
and device times arrive later, each in the order of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sglang_dflash.glue.after_step.bookkeeping import StepRows
from sglang_dflash.glue.after_step.stage_clock import StepTime
from sglang_dflash.types import Commit, RowShare
from sglang_dflash.width import Choice, WidthPolicy


@dataclass(frozen=True)
class Step:
    """A step that was started."""

    request_ids: Sequence[str]
    choice: Choice
    context: int  # tokens in the batch's prefixes, at most
    expected: float  # tokens that a request commits
    # whether the wait behind it is its own: another step follows at once, not a prefill, and the
    # host did not have the tokens of another number of passes to process meanwhile
    has_own_wait: bool = True
    # if rows were shared, on their way to the host: where each request's rows begin, and the
    # drafter's confidence
    bounds: Tensor | None = None
    confidence: Tensor | None = None


class WidthChoice:
    """Chooses widths, and hands results and times of the steps to the policy."""

    def __init__(
        self,
        policy: WidthPolicy,
        device: torch.device | str = "cpu",
        *,
        agree: Callable[[Choice], Choice] = lambda own: own,
    ) -> None:
        """`agree` returns the choice of all ranks, given this one's."""
        self.policy = policy
        self._agree = agree
        self._device = device
        self._without_result: deque[Step] = deque()
        self._without_time: deque[Step] = deque()
        self._running: set[str] = set()
        self._has_prefilled = False
        self._passes = 1  # of the last step
        # the policy's calibration, on the device
        self._version = -1
        self._offsets = self._slopes = torch.empty(0)

    def prefilled(self) -> None:
        """Note that requests were prefilled since the last step."""
        self._has_prefilled = True

    def start(
        self,
        request_ids: Sequence[str],
        context: int,
        *,
        may_share: bool = False,
        may_repeat: bool = False,
    ) -> tuple[Choice, RowShare | None]:
        """Choose the width of the step that is about to start, and how its rows are shared; None if
        all requests have as many."""
        requests = len(request_ids)
        if self._has_prefilled:
            self._has_prefilled = False
            if self._without_time:
                self._without_time[-1] = replace(self._without_time[-1], has_own_wait=False)
            running = set(request_ids)
            if new := len(running - self._running):
                self.policy.admit(new, requests)
            self._running = running
        own = self.policy.choose(requests, context, may_share=may_share, may_repeat=may_repeat)
        choice = self._agree(own)
        expected = self.policy.expected_tokens(choice, requests)
        # behind a step the host processes the result of the one before it
        is_like_last = choice.passes == self._passes
        self._passes = choice.passes
        step = Step(request_ids, choice, context, expected, has_own_wait=is_like_last)
        self._without_result.append(step)
        self._without_time.append(step)
        return choice, None if choice.rows is None else self._share(choice.rows)

    def committed(self, commit: Commit) -> None:
        """Send what is to be learnt from the newest step to the host. It is there by the time that
        SGLang has the step's result, whose copy follows."""
        if commit.bounds is not None and commit.confidence is not None:
            self._without_result[-1] = replace(
                self._without_result[-1],
                bounds=commit.bounds.to("cpu", non_blocking=True),
                confidence=commit.confidence.to("cpu", non_blocking=True),
            )

    def has_result(self, num_correct: Sequence[int]) -> StepRows:
        """Learn each request's number of correct drafts in the oldest step without a result, and
        return what that step verified."""
        step = self._without_result.popleft()
        choice = step.choice
        if choice.passes > 1:
            # SGLang takes the tokens of all passes but the last for drafts
            num_correct = [0] * len(num_correct)
        if step.bounds is None or step.confidence is None:
            self.policy.record(choice.width, num_correct)
            return StepRows(choice.width, step.expected, choice.passes)
        rows = np.diff(step.bounds.numpy())
        self.policy.record_shared(rows, step.confidence.numpy(), np.asarray(num_correct))
        by_request = dict(zip(step.request_ids, rows.tolist(), strict=True))
        return StepRows(by_request, step.expected)

    def has_time(self, time: StepTime) -> None:
        """Learn the times of the oldest step without any."""
        step = self._without_time.popleft()
        device_ms = 1000 * (time.whole - time.waiting)
        idle_ms = 1000 * (time.waiting + time.idle_after) if step.has_own_wait else None
        self.policy.timed(len(step.request_ids), step.choice, step.context, device_ms, idle_ms)

    def _share(self, num_rows: int) -> RowShare:
        calibration = self.policy.calibration
        if self._version != calibration.version:
            self._version = calibration.version
            # a copy, which later learning leaves alone
            numbers = torch.from_numpy(np.stack([calibration.offsets, calibration.slopes]))
            self._offsets, self._slopes = numbers.to(self._device, non_blocking=True)
        return RowShare(num_rows, self._offsets, self._slopes)
