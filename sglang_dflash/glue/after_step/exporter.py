"""The meter as Prometheus counters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_dflash.glue.after_step.stage_clock import STAGES, StageClock
from sglang_dflash.metrics import AcceptanceAlarm, AcceptanceMeter, observe


class PrometheusExporter:
    """The meter as Prometheus counters, under SGLang's names and labels.

    Counters catch up with the meter when a request ends or a second has passed, not at every
    step: a scrape is exact whenever nothing is in flight.
    """

    def __init__(self, labels: dict[str, str], block_size: int, registry: Any = None) -> None:
        """`registry`: where the counters are found; by default where SGLang's are."""
        # imported late: SGLang must set the directory that its processes share first
        from prometheus_client import REGISTRY, Counter, Histogram

        place: Any = {"registry": REGISTRY if registry is None else registry}
        self._last = AcceptanceMeter(block_size)
        self._last_seconds = dict.fromkeys(STAGES, 0.0)
        self._last_timed = 0
        self._last_alarms = 0

        # every series is created now, so that rate() has a starting point, and kept, because
        # looking one up takes longer than adding to it

        def counter(name: str, text: str) -> Any:
            return Counter(f"sglang:dflash_{name}", text, [*labels], **place).labels(**labels)

        def counters(name: str, text: str, by: str, values: Iterable[object]) -> list[Any]:
            each = Counter(f"sglang:dflash_{name}", text, [*labels, by], **place)
            return [each.labels(**labels, **{by: str(value)}) for value in values]

        self._counters = {
            "verify_steps": counter("verify_steps_total", "Verify steps, counted per request."),
            "drafted_tokens": counter("drafted_tokens_total", "Drafted tokens."),
            "accepted_drafts": counter("accepted_tokens_total", "Accepted draft tokens."),
            "committed_tokens": counter(
                "committed_tokens_total", "Tokens committed by verify steps."
            ),
            "expected_tokens": counter(
                "expected_tokens_total", "Tokens expected when the verify widths were chosen."
            ),
            "verified_rows": counter(
                "verified_rows_total", "Rows verified: anchors and drafts of all requests."
            ),
        }
        self._at_width = counters(
            "verify_steps_at_width_total",
            "Verify steps of this width, per request.",
            by="width",
            values=range(1, block_size + 1),
        )
        self._accepted_at = counters(
            "accepted_at_position_total",
            "Verify steps that accepted the draft at this position.",
            by="position",
            values=range(1, block_size),
        )
        self._seconds = counters(
            "stage_seconds_total", "Time spent in a stage.", by="stage", values=STAGES
        )
        self._timed = counter("timed_steps_total", "Batch steps whose stages were timed.")
        self._alarms = counter("alarms_total", "Low-acceptance alarms raised.")
        self._histogram = Histogram(
            "sglang:dflash_committed_tokens_per_step",
            "Tokens committed per verify step.",
            [*labels],
            buckets=[float(k) for k in range(1, block_size + 1)],
            **place,
        ).labels(**labels)

    def flush(self, meter: AcceptanceMeter, clock: StageClock, alarm: AcceptanceAlarm) -> None:
        """Bring the counters up to date with the meter."""
        new = meter.since(self._last)
        self._last = meter.copy()
        for name, counter in self._counters.items():
            counter.inc(getattr(new, name))
        for counters, counts in (
            (self._accepted_at, new.accepted_at),
            (self._at_width, new.at_width),
        ):
            for counter, count in zip(counters, counts, strict=True):
                if count:
                    counter.inc(count)
        for committed, steps in enumerate(new.histogram, start=1):
            if steps:
                observe(self._histogram, committed, steps)
        for counter, stage in zip(self._seconds, STAGES, strict=True):
            counter.inc(clock.seconds[stage] - self._last_seconds[stage])
        self._last_seconds = dict(clock.seconds)
        self._timed.inc(clock.steps - self._last_timed)
        self._last_timed = clock.steps
        self._alarms.inc(alarm.raised - self._last_alarms)
        self._last_alarms = alarm.raised
