"""What a step takes where the host sets the pace, and not the device.

With a small target the device finishes a step before the host has prepared the next one. Rows, and
even a draft pass, then cost nothing, as long as the host has no more to do: its time depends on the
kind of a step and on the number of requests. It is learnt from the steps in which or after which
the device stood idle; a busy device shows only that the host takes no longer.

Without overlap scheduling the host prepares a step while the device stands still. What it takes is
then no lower bound but added to the device's time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

# the host sets the pace of a step if the device stands idle for this share of it: between two steps
# a busy device also runs what SGLang launches there
IDLE_SHARE = 0.05
# steps that the time is the median of, how many make it known, and after how many others it is
# forgotten: a single step may have been slow by accident, or wait for one of another kind
RECENT_STEPS, ENOUGH_STEPS, KEPT_STEPS = 8, 3, 2048


class Kind(IntEnum):
    """What the host has to launch."""

    PLAIN = 0  # no draft pass
    UNIFORM = 1  # as many rows for each request
    SHARED = 2  # rows are shared out
    REPEATED = 3  # several passes without drafts

    @classmethod
    def of(cls, width: int, rows: int | None, passes: int) -> Kind:
        if rows is not None:
            return cls.SHARED
        if passes > 1:
            return cls.REPEATED
        return cls.PLAIN if width == 1 else cls.UNIFORM


class HostTimes:
    """The host's time for a step by its kind, learnt separately for each doubling of requests."""

    def __init__(self, *, overlaps: bool = True) -> None:
        """`overlaps`: the host prepares a step while the device runs another."""
        self._overlaps = overlaps
        self._known: dict[tuple[Kind, int], _Known] = {}
        self._steps = 0

    def record(self, kind: Kind, requests: int, device_ms: float, idle_ms: float | None) -> bool:
        """Learn from a step, in which the device worked so long, and waited so long until the next
        one; None if that is not known. Return whether the host has set its pace."""
        self._steps += 1
        if idle_ms is None:
            return self._is_paced(requests)
        known = self._known.get((kind, requests.bit_length()))
        took_ms = device_ms + idle_ms
        is_paced = self._overlaps and idle_ms > IDLE_SHARE * took_ms
        is_exact = is_paced or not self._overlaps
        is_whole = self._overlaps
        if kind is Kind.REPEATED:
            # the device's waits between the passes count as its work: only the sum is known
            is_paced = is_exact = is_whole = True
        if known is None and is_exact:
            known = self._known[kind, requests.bit_length()] = _Known()
        if known is not None:
            ms = took_ms if is_whole else idle_ms
            known.add(ms, is_paced=is_paced, is_exact=is_exact, step=self._steps)
        return is_paced

    def step_ms(
        self, kind: Kind, requests: int, device_ms: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return what steps take that take the device so long."""
        host_ms = self.ms(kind, requests)
        if not host_ms:
            return device_ms
        if self._overlaps or kind is Kind.REPEATED:
            return np.maximum(device_ms, host_ms)
        return device_ms + host_ms

    def ms(self, kind: Kind, requests: int) -> float:
        """Return the host's time for a step; 0 if nothing is known."""
        place = kind, requests.bit_length()
        known = self._known.get(place)
        if known is None:
            return 0.0
        if self._steps - known.step > KEPT_STEPS:
            # other steps were chosen since, perhaps because of an accident
            del self._known[place]
            return 0.0
        return known.ms

    def _is_paced(self, requests: int) -> bool:
        """Return whether the host has lately set the pace of steps of any kind at this load."""
        doublings = requests.bit_length()
        return any(
            known.is_paced for (_, other), known in self._known.items() if other == doublings
        )

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the ms by kind, and by the least number of requests they hold for."""
        found: dict[str, dict[str, float]] = {}
        for (kind, doublings), known in sorted(self._known.items(), key=lambda item: item[0]):
            if known.ms:
                requests = str(1 << doublings >> 1)
                found.setdefault(kind.name.lower(), {})[requests] = round(known.ms, 3)
        return found


@dataclass
class _Known:
    """Of one kind of step, at one load."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    ms: float = 0.0  # their median, if there are enough
    step: int = 0  # when it was last seen to be so
    is_paced: bool = False  # whether the host has set the pace of the last one

    def add(self, ms: float, *, is_paced: bool, is_exact: bool, step: int) -> None:
        """Add a step's time; unless it is exact, the host has taken no longer than that."""
        if is_exact or ms < self.ms:
            self.step = step
        self.recent.append(ms if is_exact else min(self.ms, ms))
        if len(self.recent) >= ENOUGH_STEPS:
            self.ms = sorted(self.recent)[len(self.recent) // 2]
        self.is_paced = is_paced
