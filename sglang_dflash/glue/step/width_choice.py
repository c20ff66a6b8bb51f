"""The verify width of each step, and what the policy learns once a step's result is known.

With overlap scheduling a step is chosen before the last one's result has reached the host. Results
and device times arrive later, each in the order of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sglang_dflash.width import WidthPolicy


class Step(NamedTuple):
    """A step that was started."""

    requests: int
    width: int
    context: int  # tokens in the batch's prefixes, at most


class WidthChoice:
    """Chooses widths, and hands results and times of the steps to the policy."""

    def __init__(self, policy: WidthPolicy) -> None:
        self.policy = policy
        self._without_result: deque[Step] = deque()
        self._without_time: deque[Step] = deque()
        self._running: set[str] = set()
        self._has_prefilled = False

    def prefilled(self) -> None:
        """Note that requests were prefilled since the last step."""
        self._has_prefilled = True

    def start(self, request_ids: Sequence[str], context: int) -> int:
        """Choose the width of the step that is about to start."""
        requests = len(request_ids)
        if self._has_prefilled:
            self._has_prefilled = False
            running = set(request_ids)
            if new := len(running - self._running):
                self.policy.admit(new, requests)
            self._running = running
        width = self.policy.choose(requests, context)
        step = Step(requests, width, context)
        self._without_result.append(step)
        self._without_time.append(step)
        return width

    def has_result(self, num_correct: Sequence[int]) -> int:
        """Learn each request's number of correct drafts in the oldest step without a result; return
        that step's width."""
        step = self._without_result.popleft()
        self.policy.record(step.requests, step.width, step.context, None, num_correct)
        return step.width

    def has_time(self, seconds: float) -> None:
        """Learn the time of the oldest step without one."""
        step = self._without_time.popleft()
        self.policy.timed(step.requests, step.width, step.context, seconds * 1000)
