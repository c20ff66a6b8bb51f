"""A plug-in for tests: the same order of penalties in every process.

SGLang keeps its penalisers in a set of classes. Without overlap scheduling it applies them in that
set's order, which depends on memory addresses and differs between processes; with overlap the
additive ones always come first. This plug-in uses the second order for both.
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
