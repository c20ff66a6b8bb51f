"""Break down a decode step's GPU time, from a profiler trace of an SGLang server.

    python -m benchmarks.trace_split TRACE.json.gz --top 15 --out split.json

A step of our worker begins with its `_build_block` kernel, drafting ends with the first
`_argmax_merge` and verifying with `_accept_block`. Other workers, and plain decoding, have no such
marks: there the kernels of a CUDA graph share a launch, the largest graph is the target's, and a
step lasts from one of its launches to the next. Only whole steps count, without the last and the
first, which the profiler slows down. Idle is the time of a step in which no kernel runs on any
stream. Kernels overlap: each counts from the end of those that started before it, so that the parts
and idle add up to the step.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import result_files
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt

STEP, DRAFTED, COMMIT = "_build_block", "_argmax_merge", "_accept_block"
ATTENTION = ("_attend_runs", "_merge_runs", "_fwd_kernel", "extend_attention", "attn", "flash")
PRODUCTS = ("_product", "gemm", "nvjet", "cutlass_", "splitk", "gemv", "matmul")

GRAPH = 20  # kernels of one launch, at least, for it to be a CUDA graph
Event = dict[str, Any]


def kernels(path: Path) -> list[Event]:
    """Return the GPU work of a trace, sorted by start time."""
    events = result_files.read(path, "trace", "traceEvents")["traceEvents"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(work, key=lambda e: e["ts"])


def our_steps(work: list[Event]) -> list[list[Event]]:
    starts = [i for i, event in enumerate(work) if event["name"] == STEP][1:]
    return [work[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def our_phases(step: list[Event]) -> list[str]:
    """Return what each kernel of one of our steps is part of."""
    found, phase = [], "draft"
    for event in step:
        if event["name"] == COMMIT:
            phase = "commit"
        found.append(phase)
        if phase == "draft" and event["name"] == DRAFTED:
            phase = "verify"
    return found


def launch_of(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def graph_steps(work: list[Event]) -> list[list[Event]]:
    """Return the steps of any worker with CUDA graphs; empty without any."""
    sizes = Counter(launch_of(event) for event in work if launch_of(event) is not None)
    largest = max(sizes.values(), default=0)
    if largest < GRAPH:
        return []
    # its launches have as many kernels every time; a drafter has fewer layers
    targets = {launch for launch, size in sizes.items() if size > largest / 2}
    starts, seen = [], set()
    for i, event in enumerate(work):
        launch = launch_of(event)
        if launch in targets and launch not in seen:
            seen.add(launch)
            starts.append(i)
    return [work[a:b] for a, b in zip(starts[1:], starts[2:], strict=False)]


def graph_phases(step: list[Event]) -> list[str]:
    """Return what each kernel is part of: the target's graph, another graph, or none."""
    sizes = Counter(map(launch_of, step))
    target = launch_of(step[0])
    names = {True: "draft", False: "outside graphs"}
    return [
        "verify" if launch_of(event) == target else names[sizes[launch_of(event)] >= GRAPH]
        for event in step
    ]


def split_step(step: list[Event], phases: list[str], end_us: float) -> Counter[str]:
    """Return the microseconds of each part of one step, `idle` included."""
    found: Counter[str] = Counter()
    covered = step[0]["ts"]
    for event, phase in zip(step, phases, strict=True):
        name = event["name"].lower()
        part = phase
        if phase == "verify":
            if any(mark in name for mark in ATTENTION):
                part = "verify attention"
            elif any(mark in name for mark in PRODUCTS):
                part = "verify matrix products"
            else:
                part = "verify rest"
        end = min(event["ts"] + event["dur"], end_us)
        found[part] += max(0.0, end - max(event["ts"], covered))
        covered = max(covered, end)
    found["idle"] = end_us - step[0]["ts"] - found.total()
    return found


def split(path: Path) -> dict[str, Any]:
    """Return a step's mean length and parts, in milliseconds."""
    work = kernels(path)
    is_ours = any(event["name"] == STEP for event in work)
    steps = (our_steps if is_ours else graph_steps)(work)
    phases: Callable[[list[Event]], list[str]] = our_phases if is_ours else graph_phases
    if not steps:
        raise SystemExit(
            f"{path} has no complete step: fewer than three {STEP} kernels, or than three launches "
            "of a CUDA graph."
        )
    ends = [step[0]["ts"] for step in steps[1:]]
    steps = steps[: len(ends)]
    if not steps:
        raise SystemExit(f"{path} has too few steps; profile at least five.")
    parts: Counter[str] = Counter()
    for step, end in zip(steps, ends, strict=True):
        parts.update(split_step(step, phases(step), end))
    length = (ends[-1] - steps[0][0]["ts"]) / len(steps)
    return {
        "steps": len(steps),
        "step_ms": round(length / 1000, 3),
        "launches": sum(map(len, steps)) // len(steps),
        "parts_ms": {name: round(us / len(steps) / 1000, 3) for name, us in parts.most_common()},
        "idle_share": round(parts["idle"] / len(steps) / length, 4),
    }


def report(found: dict[str, Any]) -> str:
    lines = [f"{found['steps']} steps of {found['step_ms']} ms, {found['launches']} launches each"]
    for name, millis in found["parts_ms"].items():
        lines.append(f"{millis:9.3f} ms {millis / found['step_ms']:6.1%}  {name}")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=Path, help="trace file of SGLang's profiler, .json.gz")
    parser.add_argument(
        "--top", type=int, default=0, help="also list this many of the longest kernels; default: 0"
    )
    parser.add_argument("--out", type=Path, help="write the split as JSON")
    options = parser.parse_args()
    found = split(options.trace)
    print(report(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.top:
        by_name: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in kernels(options.trace):
            by_name[event["name"]] += event["dur"]
            calls[event["name"]] += 1
        for name, micros in by_name.most_common(options.top):
            print(f"{micros / 1000:9.2f} ms {calls[name]:6d}x  {name[:110]}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("trace_split", main))
