"""Where a decode step's GPU time goes, from a trace that SGLang's profiler wrote.

    python benchmarks/trace_split.py TRACE.json.gz [--top 15]

Busy time is the union of kernel intervals over all streams; idle is the rest of the span between
the first and the last kernel.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

# first match wins
GROUPS = (
    ("verify attention", ("_attend_runs", "_merge_runs", "_fwd_kernel", "extend_attention")),
    ("draft attention", ("flash_attn", "FlashAttention", "fmha", "kernel_cutlass")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "splitK", "gemv", "matmul")),
)


def kernels(path: Path) -> list[dict[str, Any]]:
    """Return the GPU work of a trace, in order of start."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(work, key=lambda e: e["ts"])


def busy_us(work: list[dict[str, Any]]) -> float:
    """Return the microseconds in which at least one kernel ran."""
    total, end = 0.0, float("-inf")
    for event in work:
        start, stop = event["ts"], event["ts"] + event["dur"]
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def group_of(name: str) -> str:
    for group, marks in GROUPS:
        if any(mark.lower() in name.lower() for mark in marks):
            return group
    return "rest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--top", type=int, default=15)
    options = parser.parse_args()
    work = kernels(options.trace)
    span = work[-1]["ts"] + work[-1]["dur"] - work[0]["ts"]
    busy = busy_us(work)
    print(f"span {span / 1000:.2f} ms, busy {busy / 1000:.2f} ms, idle {1 - busy / span:.1%}")
    by_group: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in work:
        by_group[group_of(event["name"])] += event["dur"]
        by_name[event["name"]] += event["dur"]
        calls[event["name"]] += 1
    for group, micros in by_group.most_common():
        print(f"{micros / 1000:9.2f} ms {micros / span:6.1%}  {group}")
    print(f"the {options.top} longest of {len(by_name)} kernels, {len(work)} launches:")
    for name, micros in by_name.most_common(options.top):
        print(f"{micros / 1000:9.2f} ms {calls[name]:6d}x  {name[:110]}")


if __name__ == "__main__":
    main()
