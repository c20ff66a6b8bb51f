"""What a step takes where the host sets the pace, and not the device.

With a small target the device finishes a step before the host has prepared the next one. Rows, and
even a draft pass, then cost nothing, as long as the host has no more to do: its time depends on the
kind of a step and on the number of requests. It is learnt from the steps after which the device
stood idle; a busy device shows only that the host takes no longer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

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
        known = self._known.get((kind, requests.bit_length()))
        if idle_ms is None:
            return known is not None and known.is_paced
        took_ms = device_ms + idle_ms
        is_paced = idle_ms > IDLE_SHARE * took_ms
        if known is None and is_paced:
            known = self._known[kind, requests.bit_length()] = _Known()
        if known is not None:
            known.add(took_ms, is_paced=is_paced, step=self._steps)
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

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    ms: float = 0.0  # their median, if there are enough
    step: int = 0  # when it was last seen to be so
    is_paced: bool = False  # whether the host has set the pace of the last one

    def add(self, took_ms: float, *, is_paced: bool, step: int) -> None:
        if is_paced or took_ms < self.ms:
            self.step = step
        self.recent.append(took_ms if is_paced else min(self.ms, took_ms))
        if len(self.recent) >= ENOUGH_STEPS:
            self.ms = sorted(self.recent)[len(self.recent) // 2]
        self.is_paced = is_paced
