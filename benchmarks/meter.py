"""Measure what the acceptance bookkeeping costs a decode step.

    python -m benchmarks.meter
    python -m benchmarks.meter --step-ms 20.1 24 57 --out benchmarks/results/meter

Runs a step's bookkeeping in isolation, as the worker does it: four marks on the stream (CUDA events
on a GPU), one record per request, counters published once a second. Reports host time per step,
which overlap scheduling hides behind the GPU, and with `--step-ms` its share of such a step; on a
GPU also the stream time of the marks, measured around short kernels with and without them.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import result_files
from benchmarks.systems import BLOCK_SIZE
from sglang_dflash.command_help import parser_of
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping
from sglang_dflash.glue.after_step.exporter import PrometheusExporter
from sglang_dflash.glue.after_step.stage_clock import STAGES
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.metrics import AcceptanceAlarm

LABELS = {"model_name": "none", "engine_type": "unified", "tp_rank": "0"}


def host_seconds_per_step(
    num_requests: int, steps: int, device_type: str, export: PrometheusExporter
) -> float:
    """Return the host time of one step's bookkeeping; the stages are empty here."""
    book = Bookkeeping(BLOCK_SIZE, device_type, AcceptanceAlarm(BLOCK_SIZE))
    book._export = export
    chance = random.Random(0)
    correct = [chance.randrange(BLOCK_SIZE) for _ in range(num_requests)]
    began = time.perf_counter()
    for _ in range(steps):
        for _ in range(len(STAGES) + 1):
            book.clock.mark()
        for num_correct in correct:
            book.record(num_correct, num_correct + 1, BLOCK_SIZE, context=1000, ended=False)
        book.batch_step()
    return (time.perf_counter() - began) / steps


def stream_seconds_per_step(steps: int) -> float:
    """Return the time that four events add to a stream that is never idle.

    A stream queues about a thousand launches; beyond that, host time would be measured.
    """
    x = torch.zeros(1 << 20, device="cuda")

    def run(between: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # lets the host run ahead of the stream
        torch.cuda._sleep(2_000_000_000)
        begin.record()
        for _ in range(steps):
            for _ in range(len(STAGES) + 1):
                between()
                x.add_(1)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / steps

    def mark() -> None:
        torch.cuda.Event(enable_timing=True).record()

    run(mark)
    bare = min(run(lambda: None) for _ in range(3))
    return min(run(mark) for _ in range(3)) - bare


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--step-ms", nargs="+", type=float, help="step time for each of --requests")
    result_files.add_result_options(parser, picture=False, servers=False)
    options = parser.parse_args()
    if options.step_ms and len(options.step_ms) != len(options.requests):
        parser.error(
            f"--step-ms has {len(options.step_ms)} values, but --requests is "
            f"{options.requests}: pass one step time for each"
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    export = PrometheusExporter(LABELS, BLOCK_SIZE)
    marks_us = 1e6 * stream_seconds_per_step(100) if device_type == "cuda" else None
    rows = []
    for i, num_requests in enumerate(options.requests):
        host_us = 1e6 * host_seconds_per_step(num_requests, options.steps, device_type, export)
        row = {"requests": num_requests, "host_us": host_us, "stream_us": marks_us}
        rows.append(row | ({"step_ms": options.step_ms[i]} if options.step_ms else {}))
    shown = table(rows)
    print(shown)
    if options.out:
        found = {**result_files.provenance(options.commit), "rows": rows}
        result_files.write(found, options.out, shown)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, with shares of a step where --step-ms was given."""
    lines = ["| requests | host | share of a step | stream | share of a step |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        cells = []
        for micros in (row["host_us"], row["stream_us"]):
            known = micros is not None and "step_ms" in row
            cells.append("" if micros is None else f"{micros:.1f} us")
            cells.append(f"{micros / 10 / row['step_ms']:.3f} %" if known else "")
        lines.append(f"| {row['requests']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("meter", main))
