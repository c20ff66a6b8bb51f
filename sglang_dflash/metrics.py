"""Acceptance, counted on the host from numbers the scheduler has copied anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class AcceptanceMeter:
    """Count verify steps by tokens committed. `histogram[k]` is the number of steps that committed
    k + 1 tokens, of one request each."""

    block_size: int
    histogram: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.histogram = [0] * self.block_size

    def record(self, num_correct: Sequence[int]) -> None:
        for count in num_correct:
            self.histogram[count] += 1

    @property
    def verify_steps(self) -> int:
        return sum(self.histogram)

    @property
    def accepted_drafts(self) -> int:
        return sum(k * steps for k, steps in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per verify step, or 0 before the first one."""
        steps = self.verify_steps
        return (self.accepted_drafts + steps) / steps if steps else 0.0

    def position_rates(self) -> list[float]:
        """Return, for each draft position, the share of steps in which it was accepted."""
        steps = self.verify_steps
        if not steps:
            return [0.0] * (self.block_size - 1)
        return [sum(self.histogram[k:]) / steps for k in range(1, self.block_size)]

    def snapshot(self) -> dict[str, object]:
        return {
            "verify_steps": self.verify_steps,
            "drafted_tokens": self.verify_steps * (self.block_size - 1),
            "accepted_tokens": self.accepted_drafts,
            "committed_tokens": self.accepted_drafts + self.verify_steps,
            "accept_length": round(self.accept_length, 4),
            "histogram": list(self.histogram),
            "position_rates": [round(rate, 4) for rate in self.position_rates()],
        }
