"""Acceptance, counted on the host from numbers the scheduler has copied anyway."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AcceptanceMeter:
    """Count verify steps of single requests: what each committed, and how far its draft was right.

    Tokens after a stop are neither committed nor accepted, and the prompt's own token is no step.
    """

    block_size: int
    histogram: list[int] = field(init=False)  # [k]: steps that committed k + 1 tokens
    accepted_at: list[int] = field(init=False)  # [k]: steps in which draft k + 1 was accepted

    def __post_init__(self) -> None:
        self.histogram = [0] * self.block_size
        self.accepted_at = [0] * (self.block_size - 1)

    def record(self, num_correct: int, committed: int) -> None:
        """Count one step of one request: correct drafts, and tokens that count after a stop cut."""
        self.histogram[committed - 1] += 1
        for position in range(min(num_correct, committed)):
            self.accepted_at[position] += 1

    @property
    def verify_steps(self) -> int:
        return sum(self.histogram)

    @property
    def accepted_drafts(self) -> int:
        return sum(self.accepted_at)

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
            "drafted_tokens": self.verify_steps * (self.block_size - 1),
            "accepted_tokens": self.accepted_drafts,
            "committed_tokens": self.committed_tokens,
            "accept_length": round(self.accept_length, 4),
            "histogram": list(self.histogram),
            "position_rates": [round(rate, 4) for rate in self.position_rates()],
        }
