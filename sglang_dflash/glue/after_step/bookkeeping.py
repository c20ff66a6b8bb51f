"""One worker's counters, and their sinks: Prometheus and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from sglang_dflash.glue import seams
from sglang_dflash.glue.after_step.exporter import PrometheusExporter
from sglang_dflash.glue.after_step.stage_clock import StageClock
from sglang_dflash.metrics import AcceptanceAlarm, AcceptanceMeter

logger = logging.getLogger(__name__)

FLUSH_S = 1.0


class Bookkeeping:
    """One worker's counters, and their sinks."""

    def __init__(self, block_size: int, device_type: str, alarm: AcceptanceAlarm) -> None:
        self.meter = AcceptanceMeter(block_size)
        self.clock = StageClock(device_type)
        self.alarm = alarm
        # verify width of the step whose result is being processed, by request id if they differ
        self._width: int | Mapping[str, int] = block_size
        # and the tokens that each of its requests was expected to commit
        self._expected = 0.0
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

    def begin_result(self, width: int | Mapping[str, int], expected: float) -> None:
        """Note the verify width of the step whose result is processed next, and the tokens that a
        request was expected to commit."""
        self._width, self._expected = width, expected

    def width_of(self, request_id: str) -> int:
        """Return the rows that a request had in the step whose result is being processed."""
        return self._width if isinstance(self._width, int) else self._width[request_id]

    def record(
        self, num_correct: int, committed: int, width: int, *, context: int, ended: bool
    ) -> None:
        """Count one step of one request, of the batch whose result is being processed."""
        self.meter.record(num_correct, committed, width, self._expected)
        warning = self.alarm.record(num_correct, committed, context, width)
        if warning is not None and self._speaks:
            logger.warning(warning)
        now = time.monotonic()
        if self._export is not None and (ended or now - self._flushed > FLUSH_S):
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
