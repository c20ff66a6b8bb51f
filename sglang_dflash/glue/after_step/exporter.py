"""The meter as Prometheus counters."""

from __future__ import annotations

from typing import Any

from sglang_dflash.glue.after_step.stage_clock import STAGES, StageClock
from sglang_dflash.metrics import AcceptanceAlarm, AcceptanceMeter, observe


class PrometheusExporter:
    """The meter as Prometheus counters, under SGLang's names and labels.

    Counters catch up with the meter when a request ends or a second has passed, not at every
    step: a scrape is exact whenever nothing is in flight.
    """

    def __init__(self, labels: dict[str, str], block_size: int) -> None:
        # imported late: SGLang must set the directory that its processes share first
        from prometheus_client import Counter, Histogram

        self._labels = labels
        self._last = AcceptanceMeter(block_size)
        self._last_seconds = dict.fromkeys(STAGES, 0.0)
        self._last_timed = 0
        self._last_alarms = 0
        names = list(labels)

        def counter(name: str, text: str, *extra: str) -> Any:
            return Counter(f"sglang:dflash_{name}", text, [*names, *extra])

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
        self._at_width = counter(
            "verify_steps_at_width_total", "Verify steps of this width, per request.", "width"
        )
        self._accepted_at = counter(
            "accepted_at_position_total",
            "Verify steps that accepted the draft at this position.",
            "position",
        )
        self._seconds = counter("stage_seconds_total", "Time spent in a stage.", "stage")
        self._timed = counter("timed_steps_total", "Batch steps whose stages were timed.")
        self._alarms = counter("alarms_total", "Low-acceptance alarms raised.")
        self._histogram = Histogram(
            "sglang:dflash_committed_tokens_per_step",
            "Tokens committed per verify step.",
            names,
            buckets=[float(k) for k in range(1, block_size + 1)],
        )
        # create every series now, so that rate() has a starting point
        for metric in (*self._counters.values(), self._timed, self._alarms, self._histogram):
            metric.labels(**labels)
        for position in range(1, block_size):
            self._accepted_at.labels(**labels, position=str(position))
        for width in range(1, block_size + 1):
            self._at_width.labels(**labels, width=str(width))
        for stage in STAGES:
            self._seconds.labels(**labels, stage=stage)

    def flush(self, meter: AcceptanceMeter, clock: StageClock, alarm: AcceptanceAlarm) -> None:
        """Bring the counters up to date with the meter."""
        new = meter.since(self._last)
        self._last = meter.copy()
        for name, counter in self._counters.items():
            counter.labels(**self._labels).inc(getattr(new, name))
        for position, count in enumerate(new.accepted_at, start=1):
            if count:
                self._accepted_at.labels(**self._labels, position=str(position)).inc(count)
        for width, count in enumerate(new.at_width, start=1):
            if count:
                self._at_width.labels(**self._labels, width=str(width)).inc(count)
        histogram = self._histogram.labels(**self._labels)
        for committed, steps in enumerate(new.histogram, start=1):
            if steps:
                observe(histogram, committed, steps)
        for stage in STAGES:
            gained = clock.seconds[stage] - self._last_seconds[stage]
            self._seconds.labels(**self._labels, stage=stage).inc(gained)
        self._last_seconds = dict(clock.seconds)
        self._timed.labels(**self._labels).inc(clock.steps - self._last_timed)
        self._last_timed = clock.steps
        self._alarms.labels(**self._labels).inc(alarm.raised - self._last_alarms)
        self._last_alarms = alarm.raised
