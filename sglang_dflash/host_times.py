"""What a step takes where the host sets the pace, and not the device.

With a small target the device finishes a step before the host has prepared the next one. Rows, and
even a draft pass, then cost nothing, as long as the host has no more to do: its time depends on the
kind of a step and on the number of requests. It is learnt from the steps after which the device
stood idle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

# the host sets the pace of a step if the device stands idle for this share of it: between two steps
# a busy device also runs what SGLang launches there
IDLE_SHARE = 0.05
# steps that the time is the median of, and after how many others it is forgotten
RECENT_STEPS, KEPT_STEPS = 8, 2048


class Kind(IntEnum):
    """What the host has to launch."""

    PLAIN = 0  # no draft pass
    UNIFORM = 1  # as many rows for each request
    SHARED = 2  # rows are shared out

    @classmethod
    def of(cls, width: int, rows: int | None) -> Kind:
        if rows is not None:
            return cls.SHARED
        return cls.PLAIN if width == 1 else cls.UNIFORM


class HostTimes:
    """The host's time for a step by its kind, learnt separately for each doubling of requests."""

    def __init__(self) -> None:
        self._known: dict[tuple[Kind, int], _Known] = {}
        self._steps = 0

    def record(self, kind: Kind, requests: int, device_ms: float, idle_ms: float | None) -> bool:
        """Learn from a step, and how long the device then waited for the next one; None if that did
        not follow at once. Return whether the host has set its pace."""
        self._steps += 1
        if idle_ms is None:
            return self.ms(kind, requests) > 0
        place = kind, requests.bit_length()
        is_paced = idle_ms > IDLE_SHARE * (device_ms + idle_ms)
        if is_paced or place in self._known:
            known = self._known.setdefault(place, _Known())
            known.recent.append(device_ms + idle_ms if is_paced else 0.0)
            known.ms = sorted(known.recent)[len(known.recent) // 2]
            known.step = self._steps
        return is_paced

    def ms(self, kind: Kind, requests: int) -> float:
        """Return what a step takes at least; 0 if nothing is known."""
        place = kind, requests.bit_length()
        known = self._known.get(place)
        if known is None:
            return 0.0
        if self._steps - known.step > KEPT_STEPS:
            # other steps were chosen since, perhaps because of an accident
            del self._known[place]
            return 0.0
        return known.ms

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

    # 0 for a step whose pace the device has set
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    ms: float = 0.0  # their median
    step: int = 0  # when it was learnt
