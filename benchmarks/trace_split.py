"""Break down a decode step's GPU time, from an SGLang profiler trace of our worker.

    python -m benchmarks.trace_split TRACE.json.gz [--top 15] [--out split.json]

A step begins with our `_build_block` kernel, drafting ends with the first `_argmax_merge` and
verifying with `_accept_block`. Only whole steps count, without the last and the first, which the
profiler slows down. Idle is the time of a step in which no kernel runs on any stream. Kernels
overlap: each counts from the end of those that started before it, so that the parts and idle add up
to the step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from sglang_dflash.interrupt import end_on_interrupt

STEP, DRAFTED, COMMIT = "_build_block", "_argmax_merge", "_accept_block"
ATTENTION = ("_attend_runs", "_merge_runs", "_fwd_kernel", "extend_attention")
PRODUCTS = ("_product", "gemm", "nvjet", "cutlass_", "splitk", "gemv", "matmul")


def kernels(path: Path) -> list[dict[str, Any]]:
    """Return the GPU work of a trace, sorted by start time."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(work, key=lambda e: e["ts"])


def whole_steps(work: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    starts = [i for i, event in enumerate(work) if event["name"] == STEP][1:]
    return [work[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def split_step(step: list[dict[str, Any]], end_us: float) -> Counter[str]:
    """Return the microseconds of each part of one step, `idle` included."""
    found: Counter[str] = Counter()
    phase = "draft"
    covered = step[0]["ts"]
    for event in step:
        if event["name"] == COMMIT:
            phase = "commit"
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
        if phase == "draft" and event["name"] == DRAFTED:
            phase = "verify"
    found["idle"] = end_us - step[0]["ts"] - found.total()
    return found


def split(path: Path) -> dict[str, Any]:
    """Return a step's mean length and parts, in milliseconds."""
    work = kernels(path)
    steps = whole_steps(work)
    if not steps:
        raise SystemExit(
            f"{path} has no complete step of our worker: fewer than three {STEP} kernels."
        )
    ends = [step[0]["ts"] for step in steps[1:]]
    steps = steps[: len(ends)]
    if not steps:
        raise SystemExit(f"{path} has too few steps; profile at least five.")
    parts: Counter[str] = Counter()
    for step, end in zip(steps, ends, strict=True):
        parts.update(split_step(step, end))
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument(
        "--top", type=int, default=0, help="also list this many of the longest kernels"
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
