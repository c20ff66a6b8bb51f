"""One worker's counters, and their sinks: Prometheus and the log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_dflash.glue import seams
from sglang_dflash.glue.after_step.exporter import PrometheusExporter
from sglang_dflash.glue.after_step.stage_clock import StageClock
from sglang_dflash.metrics import LONG_CONTEXT, AcceptanceAlarm, AcceptanceMeter

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
        self._meter = AcceptanceMeter(block_size)
        self.clock = StageClock(device_type)
        self.alarm = alarm
        # of the step whose result is being processed: what it verified, and the requests recorded,
        # by correct drafts, tokens committed, rows and whether the context is long
        self._rows = StepRows(block_size)
        self._recorded: Counter[tuple[int, int, int, bool]] = Counter()
        self._export: PrometheusExporter | None = None
        self._speaks = True
        self._flushed = time.monotonic()
        self._log_interval = 0
        self._logged = self._meter.copy()
        self._batch_steps = 0

    def publish(self, scheduler: Any) -> None:
        """Take from the running scheduler whether and where to publish. All ranks of a replica
        count the same, so only SGLang's logging rank reports."""
        reporter, collector = scheduler.metrics_reporter, scheduler.metrics_collector
        self._speaks = reporter.is_stats_logging_rank
        self._log_interval = seams.settings(scheduler.server_args).decode_log_interval
        if reporter.current_scheduler_metrics_enabled and collector is not None:
            self._export = PrometheusExporter(dict(collector.labels), self._meter.block_size)

    @property
    def meter(self) -> AcceptanceMeter:
        """The counts of all steps recorded so far."""
        self._count()
        return self._meter

    def begin_result(self, rows: StepRows) -> None:
        """Note what was verified in the step whose result is processed next."""
        self._count()
        self._rows = rows
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

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
        # the requests of a step are many, and most alike: they are counted together
        self._recorded[num_correct, committed, width, context > LONG_CONTEXT] += 1
        if ended:
            self._flush()

    def _count(self) -> None:
        """Count the requests recorded since the last time."""
        for (num_correct, committed, width, is_long), times in self._recorded.items():
            if self.passes > 1:
                self._meter.record(0, 1, 1, 1.0, times=committed * times)
            else:
                expected = self._rows.expected
                self._meter.record(num_correct, committed, width, expected, times=times)
            warning = self.alarm.record(num_correct, committed, width, is_long=is_long, times=times)
            if warning is not None and self._speaks:
                logger.warning(warning)
        self._recorded.clear()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._export is not None:
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
