"""How many rows each step verifies, and what the policy learns once a step's result is known.

With overlap scheduling a step is chosen before the last one's result has reached the host. Results
and device times arrive later, each in the order of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

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
    is_followed: bool = True  # by another step at once, not by a prefill
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
        # the policy's calibration, on the device
        self._version = -1
        self._offsets = self._slopes = torch.empty(0)

    def prefilled(self) -> None:
        """Note that requests were prefilled since the last step."""
        self._has_prefilled = True

    def start(
        self, request_ids: Sequence[str], context: int, *, may_share: bool = False
    ) -> tuple[int, RowShare | None]:
        """Choose the width of the step that is about to start, and how its rows are shared; None if
        all requests have as many."""
        requests = len(request_ids)
        if self._has_prefilled:
            self._has_prefilled = False
            if self._without_time:
                self._without_time[-1] = replace(self._without_time[-1], is_followed=False)
            running = set(request_ids)
            if new := len(running - self._running):
                self.policy.admit(new, requests)
            self._running = running
        choice = self._agree(self.policy.choose(requests, context, may_share=may_share))
        expected = self.policy.expected_tokens(choice, requests)
        step = Step(request_ids, choice, context, expected)
        self._without_result.append(step)
        self._without_time.append(step)
        return choice.width, None if choice.rows is None else self._share(choice.rows)

    def committed(self, commit: Commit) -> None:
        """Send what is to be learnt from the newest step to the host. It is there by the time that
        SGLang has the step's result, whose copy follows."""
        if commit.bounds is not None and commit.confidence is not None:
            self._without_result[-1] = replace(
                self._without_result[-1],
                bounds=commit.bounds.to("cpu", non_blocking=True),
                confidence=commit.confidence.to("cpu", non_blocking=True),
            )

    def has_result(self, num_correct: Sequence[int]) -> tuple[int | Mapping[str, int], float]:
        """Learn each request's number of correct drafts in the oldest step without a result.

        Return that step's width, or each request's if rows were shared, and the tokens that a
        request was expected to commit.
        """
        step = self._without_result.popleft()
        if step.bounds is None or step.confidence is None:
            self.policy.record(step.choice.width, num_correct)
            return step.choice.width, step.expected
        rows = np.diff(step.bounds.numpy())
        self.policy.record_shared(rows, step.confidence.numpy(), np.asarray(num_correct))
        return dict(zip(step.request_ids, rows.tolist(), strict=True)), step.expected

    def has_time(self, time: StepTime) -> None:
        """Learn the times of the oldest step without any. If another kind of pass followed it, the
        wait for the next step is no one's."""
        step = self._without_time.popleft()
        device_ms = 1000 * (time.whole - time.waiting)
        idle_ms = 1000 * (time.waiting + time.idle_after) if step.is_followed else None
        self.policy.timed(len(step.request_ids), step.choice, step.context, device_ms, idle_ms)

    def _share(self, num_rows: int) -> RowShare:
        calibration = self.policy.calibration
        if self._version != calibration.version:
            self._version = calibration.version
            # a copy, which later learning leaves alone
            numbers = torch.from_numpy(np.stack([calibration.offsets, calibration.slopes]))
            self._offsets, self._slopes = numbers.to(self._device, non_blocking=True)
        return RowShare(num_rows, self._offsets, self._slopes)
