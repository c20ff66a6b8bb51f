"""One worker's counters, and their sinks: Prometheus and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_dflash.glue import seams
from sglang_dflash.glue.after_step.exporter import PrometheusExporter
from sglang_dflash.glue.after_step.stage_clock import StageClock
from sglang_dflash.metrics import AcceptanceAlarm, AcceptanceMeter

logger = logging.getLogger(__name__)

FLUSH_S = 1.0


class StepRows(NamedTuple):
    """What a step verified."""

    width: int | Mapping[str, int]  # rows of each request, by its id if they differ
    expected: float = 0.0  # tokens that a request was expected to commit
    passes: int = 1  # without drafts, if there are several, of one row per request each


class Bookkeeping:
    """One worker's counters, and their sinks."""

    def __init__(self, block_size: int, device_type: str, alarm: AcceptanceAlarm) -> None:
        self.meter = AcceptanceMeter(block_size)
        self.clock = StageClock(device_type)
        self.alarm = alarm
        # of the step whose result is being processed
        self._rows = StepRows(block_size)
        self._export: PrometheusExporter | None = None
        self._speaks = True
        self._flushed = time.monotonic()
        self._log_interval = 0
        self._logged = self.meter.copy()
        self._batch_steps = 0

    def publish(self, scheduler: Any) -> None:
        """Take from the running scheduler whether and where to publish. All ranks of a replica
        count the same, so only SGLang's logging rank reports."""
        reporter, collector = scheduler.metrics_reporter, scheduler.metrics_collector
        self._speaks = reporter.is_stats_logging_rank
        self._log_interval = seams.settings(scheduler.server_args).decode_log_interval
        if reporter.current_scheduler_metrics_enabled and collector is not None:
            self._export = PrometheusExporter(dict(collector.labels), self.meter.block_size)

    def begin_result(self, rows: StepRows) -> None:
        """Note what was verified in the step whose result is processed next."""
        self._rows = rows

    @property
    def passes(self) -> int:
        """The passes of the step whose result is being processed."""
        return self._rows.passes

    def width_of(self, request_id: str) -> int:
        """Return the rows that a request had in a pass of that step."""
        width = self._rows.width
        return width if isinstance(width, int) else width[request_id]

    def record(
        self, num_correct: int, committed: int, width: int, *, context: int, ended: bool
    ) -> None:
        """Count one step of one request, of the batch whose result is being processed. Each pass
        of a step without drafts counts as a step."""
        if self.passes > 1:
            self.meter.record(0, 1, 1, 1.0, times=committed)
        else:
            self.meter.record(num_correct, committed, width, self._rows.expected)
        warning = self.alarm.record(num_correct, committed, context, width)
        if warning is not None and self._speaks:
            logger.warning(warning)
        if self._export is not None:
            now = time.monotonic()
            if ended or now - self._flushed > FLUSH_S:
                self._flushed = now
                self._export.flush(self.meter, self.clock, self.alarm)

    def batch_step(self) -> None:
        """Count one step of the batch; log acceptance once per decode log interval."""
        self._batch_steps += 1
        if not (self._speaks and self._log_interval) or self._batch_steps % self._log_interval:
            return
        window = self.meter.since(self._logged)
        self._logged = self.meter.copy()
        if window.verify_steps:
            logger.info("DFLASH: %s", window.line())
