"""Measure what the acceptance bookkeeping costs a decode step.

    python -m benchmarks.meter
    python -m benchmarks.meter --step-ms 20.1 24 57 --out benchmarks/results/meter

Runs a step's bookkeeping in isolation, as the worker does it: four marks on the stream (CUDA events
on a GPU), each request's check for its end and one record of its step, counters published once a
second. Requests are SGLang's own and commit 1 to 16 tokens a step. Reports host time per step,
beside that of SGLang's check alone, which runs for each request without us, too. Overlap scheduling
hides it behind the GPU, unless the host sets the pace. With `--step-ms` also its share of such a
step, and on a GPU the stream time of the marks, measured around short kernels with and without
them.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from benchmarks import batch_load, result_files
from benchmarks.systems import BLOCK_SIZE
from sglang_dflash.command_help import parser_of
from sglang_dflash.glue import compat
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping, StepRows
from sglang_dflash.glue.after_step.exporter import PrometheusExporter
from sglang_dflash.glue.after_step.request_end import count_steps_in, finish_and_meter
from sglang_dflash.glue.after_step.stage_clock import STAGES
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.metrics import AcceptanceAlarm

LABELS = {"model_name": "none", "engine_type": "unified", "tp_rank": "0"}


Finish = Callable[[Any, int], Any]


def seconds_per_step(
    num_requests: int, steps: int, marks: Callable[[], object], finish: Finish
) -> float:
    """Return the host time of steps whose tokens have arrived: their marks, and each request's
    check for its end."""
    chance = random.Random(0)
    reqs = [_request(str(i)) for i in range(num_requests)]
    seconds = 0.0
    for _ in range(steps):
        committed = [chance.randint(1, BLOCK_SIZE) for _ in reqs]
        for req, tokens in zip(reqs, committed, strict=True):
            # as SGLang counts a step's result before it asks whether a request has ended
            req.output_ids.extend(range(3, 3 + tokens))
            req.spec_verify_ct += 1
            req.spec_num_correct_drafts += tokens - 1
            req.update_spec_correct_drafts_histogram(tokens - 1)
        began = time.perf_counter()
        marks()
        for req, tokens in zip(reqs, committed, strict=True):
            finish(req, tokens)
        seconds += time.perf_counter() - began
    return seconds / steps


def _request(name: str) -> Any:
    params = compat.SamplingParams(max_new_tokens=1 << 30, stop_token_ids=[2])
    params.normalize(None)
    return compat.Req(name, "", [1] * 1000, params, vocab_size=1 << 18)


def host_seconds_per_step(num_requests: int, steps: int, book: Bookkeeping) -> tuple[float, float]:
    """Return the host time of one step's bookkeeping, and of SGLang's own checks alone; the stages
    are empty here."""
    own = getattr(compat.Req.update_finish_state, "__wrapped__", compat.Req.update_finish_state)

    def marks() -> None:
        # the counts of the step before, whose result was processed meanwhile
        book.begin_result(StepRows(BLOCK_SIZE))
        for _ in range(len(STAGES) + 1):
            book.clock.mark()
        book.batch_step()

    ours = seconds_per_step(
        num_requests, steps, marks, lambda req, tokens: finish_and_meter(own, req, tokens)
    )
    return ours, seconds_per_step(num_requests, steps, lambda: None, own)


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
    batch_load.add_requests_option(parser)
    parser.add_argument(
        "--steps", type=int, default=5000, help="steps to average over; default: %(default)s"
    )
    parser.add_argument(
        "--step-ms", nargs="+", type=float, help="milliseconds of a step, for each of --requests"
    )
    result_files.add_result_options(parser, picture=False, servers=False)
    options = parser.parse_args()
    if options.step_ms and len(options.step_ms) != len(options.requests):
        parser.error(
            f"--step-ms has {len(options.step_ms)} values, but --requests is "
            f"{options.requests}: pass one step time for each"
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    book = Bookkeeping(BLOCK_SIZE, device_type, AcceptanceAlarm(BLOCK_SIZE))
    book._export = PrometheusExporter(LABELS, BLOCK_SIZE, CollectorRegistry())
    count_steps_in(book)
    marks_us = 1e6 * stream_seconds_per_step(100) if device_type == "cuda" else None
    rows = []
    for i, num_requests in enumerate(options.requests):
        ours, own = host_seconds_per_step(num_requests, options.steps, book)
        row = {"requests": num_requests, "host_us": 1e6 * ours, "sglang_us": 1e6 * own}
        row["stream_us"] = marks_us
        rows.append(row | ({"step_ms": options.step_ms[i]} if options.step_ms else {}))
    shown = table(rows)
    print(shown)
    if options.out:
        found = {**result_files.provenance(options.commit), "rows": rows}
        result_files.write(found, options.out, shown)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, with shares of a step where --step-ms was given."""
    lines = ["| requests | SGLang's check | host | share of a step | stream | share of a step |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        cells = []
        for micros in (row["host_us"], row["stream_us"]):
            known = micros is not None and "step_ms" in row
            cells.append("" if micros is None else f"{micros:.1f} us")
            cells.append(f"{micros / 10 / row['step_ms']:.3f} %" if known else "")
        first = f"| {row['requests']} | {row['sglang_us']:.1f} us | "
        lines.append(first + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("meter", main))
