"""What SGLang shows of a DFLASH server: Prometheus, the log, /server_info, each request's own."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from sglang_dflash.glue import changes
from sglang_dflash.metrics import AcceptanceAlarm, AcceptanceMeter

logger = logging.getLogger(__name__)

STAGES = ("draft", "verify", "commit")
FLUSH_S = 1.0

META_INFO = changes.Fields("meta_info", {"dflash": "an answer says how its drafts did"})
STATE = changes.Fields(
    "GetInternalStateReqOutput", {"internal_state": "/server_info says what runs and how it does"}
)


class StageClock:
    """Time of each stage without waiting for it: marks are read once the GPU has passed them."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._open: list[list[Any]] = []
        self._current: list[Any] = []
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.steps = 0

    def mark(self) -> None:
        """Note that a stage begins or ends here: four marks make a step."""
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._current.append(moment)
        if len(self._current) == len(STAGES) + 1:
            self._open.append(self._current)
            self._current = []
            self._settle()

    def _settle(self) -> None:
        while self._open and (not self._cuda or self._open[0][-1].query()):
            marks = self._open.pop(0)
            for stage, begin, end in zip(STAGES, marks[:-1], marks[1:], strict=True):
                self.seconds[stage] += begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            self.steps += 1


class Export:
    """The meter as Prometheus counters, under SGLang's names and labels.

    Counters follow the meter when a request ends or a second has passed, not at every step: what
    a scrape sees is exact whenever nothing is in flight.
    """

    def __init__(self, labels: dict[str, str], block_size: int) -> None:
        # after SGLang has named the folder that its processes share
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
            "verify_steps": counter("verify_steps_total", "Verify steps of single requests."),
            "drafted_tokens": counter("drafted_tokens_total", "Tokens that were drafted."),
            "accepted_drafts": counter("accepted_tokens_total", "Drafts the target agreed with."),
            "committed_tokens": counter("committed_tokens_total", "Tokens added by verify steps."),
        }
        self._accepted_at = counter(
            "accepted_at_position_total", "Steps in which this draft was accepted.", "position"
        )
        self._seconds = counter("stage_seconds_total", "Time spent in a stage.", "stage")
        self._timed = counter("timed_steps_total", "Batch steps whose stages were timed.")
        self._alarms = counter("alarms_total", "Times that acceptance was found low.")
        self._histogram = Histogram(
            "sglang:dflash_committed_tokens_per_step",
            "Tokens committed by a verify step.",
            names,
            buckets=[float(k) for k in range(1, block_size + 1)],
        )
        # every series exists from the start, so that a rate over it has a beginning
        for metric in (*self._counters.values(), self._timed, self._alarms, self._histogram):
            metric.labels(**labels)
        for position in range(1, block_size):
            self._accepted_at.labels(**labels, position=str(position))
        for stage in STAGES:
            self._seconds.labels(**labels, stage=stage)

    def flush(self, meter: AcceptanceMeter, clock: StageClock, alarm: AcceptanceAlarm) -> None:
        """Bring the counters up to the meter."""
        new = meter.since(self._last)
        self._last = meter.copy()
        for name, counter in self._counters.items():
            counter.labels(**self._labels).inc(getattr(new, name))
        for position, count in enumerate(new.accepted_at, start=1):
            if count:
                self._accepted_at.labels(**self._labels, position=str(position)).inc(count)
        histogram = self._histogram.labels(**self._labels)
        for committed, steps in enumerate(new.histogram, start=1):
            for _ in range(steps):
                histogram.observe(committed)
        for stage in STAGES:
            gained = clock.seconds[stage] - self._last_seconds[stage]
            self._seconds.labels(**self._labels, stage=stage).inc(gained)
        self._last_seconds = dict(clock.seconds)
        self._timed.labels(**self._labels).inc(clock.steps - self._last_timed)
        self._last_timed = clock.steps
        self._alarms.labels(**self._labels).inc(alarm.raised - self._last_alarms)
        self._last_alarms = alarm.raised


class Bookkeeping:
    """Everything that is counted about one worker, and who is told."""

    def __init__(self, block_size: int, device_type: str, alarm: AcceptanceAlarm) -> None:
        self.meter = AcceptanceMeter(block_size)
        self.clock = StageClock(device_type)
        self.alarm = alarm
        self._export: Export | None = None
        self._speaks = True
        self._flushed = time.monotonic()
        self._log_interval = 0
        self._logged = self.meter.copy()
        self._batch_steps = 0

    def publish(self, scheduler: Any) -> None:
        """Learn from the running scheduler whether and where to publish. All ranks of a replica
        count the same, so SGLang's choice among them speaks for it."""
        reporter, collector = scheduler.metrics_reporter, scheduler.metrics_collector
        self._speaks = reporter.is_stats_logging_rank
        self._log_interval = scheduler.server_args.decode_log_interval
        if reporter.current_scheduler_metrics_enabled and collector is not None:
            self._export = Export(dict(collector.labels), self.meter.block_size)

    def record(self, num_correct: int, committed: int, *, context: int, ended: bool) -> None:
        """Count one step of one request."""
        self.meter.record(num_correct, committed)
        warning = self.alarm.record(num_correct, committed, context)
        if warning is not None and self._speaks:
            logger.warning(warning)
        now = time.monotonic()
        if self._export is not None and (ended or now - self._flushed > FLUSH_S):
            self._flushed = now
            self._export.flush(self.meter, self.clock, self.alarm)

    def batch_step(self) -> None:
        """Count one step of the batch; say how it goes once per decode log interval."""
        self._batch_steps += 1
        if not (self._speaks and self._log_interval) or self._batch_steps % self._log_interval:
            return
        window = self.meter.since(self._logged)
        self._logged = self.meter.copy()
        if window.verify_steps:
            logger.info("DFLASH: %s", window.line())


def describe_server(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Add what runs, how it does and what is changed in SGLang to /server_info."""
    state = original(scheduler, recv_req)
    if scheduler.spec_algorithm.is_dflash():
        worker = scheduler.draft_worker
        answer = STATE.edit(state, "internal_state")
        answer["sglang_dflash"] = {
            **worker.describe(),
            "dp_rank": scheduler.ps.dp_rank or 0,
            "acceptance": worker.book.meter.snapshot(),
            "alarms": worker.book.alarm.raised,
            "free_kv_slots": scheduler.token_to_kv_pool_allocator.available_size(),
            "changes": changes.listed(),
        }
    return state


def describe_request(
    original: Any, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """Add a request's acceptance to its meta_info, beside SGLang's own `spec_` values.

    The first token comes from the prompt and is no step's, so it is left out of the length.
    """
    original(manager, meta_info, recv_obj, i)
    steps = meta_info.get("spec_verify_ct", 0)
    if not steps or manager.server_args.speculative_algorithm != "DFLASH":
        return
    request = {
        "accept_length": (recv_obj.completion_tokens[i] - 1) / steps,
        "verify_steps": steps,
        "drafted_tokens": meta_info["spec_num_proposed_drafts"],
        "accepted_tokens": meta_info["spec_num_correct_drafts"],
        "accepted_histogram": list(meta_info.get("spec_correct_drafts_histogram", ())),
    }
    META_INFO.put(meta_info, dflash=request)
