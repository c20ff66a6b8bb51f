"""A plug-in for tests: one order of penalties, whatever the process.

SGLang keeps its penalisers in a set of classes. Without overlap scheduling it applies them in that
set's order, which follows memory addresses and differs from process to process; with overlap the
additive ones always come first. This makes the second order hold for both.
"""

from __future__ import annotations

from typing import Any


def activate() -> None:
    from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator

    begin = BatchedPenalizerOrchestrator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        ordered = sorted(
            self.penalizers.items(), key=lambda item: (item[0].is_multiplicative, item[0].__name__)
        )
        self.penalizers = dict(ordered)

    BatchedPenalizerOrchestrator.__init__ = init
