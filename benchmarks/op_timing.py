"""Time the ops of a step besides verify attention: ours, their PyTorch references, SGLang's.

Each case is timed as a CUDA graph of calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu import Gpu, replay_us
from benchmarks.op_cases import Call, Case, cases
from benchmarks.op_inputs import Sizes
from sglang_dflash.kernels import Ops

HEADER = (
    "| op | requests | ours, us | twin, us | SGLang, us | floor, us | ours TB/s |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class OpRow:
    op: str
    requests: int
    ours_us: float
    twin_us: float | None
    sglang_us: float | None
    tb_per_s: float
    floor_us: float


def measure_ops(requests: list[int], ops: Ops, gpu: Gpu, replays: int) -> Iterator[OpRow]:
    for count in requests:
        for case in cases(count, ops, Sizes(), torch.bfloat16, "cuda"):
            ours = time_us(case.ours, replays, case.calls)
            yield OpRow(
                op=case.op,
                requests=count,
                ours_us=ours,
                twin_us=case.twin and time_us(case.twin, replays, case.calls),
                sglang_us=case.sglang and time_of_theirs(case, replays),
                tb_per_s=case.moved / ours / 1e6,
                floor_us=case.moved / gpu.bandwidth * 1e6,
            )


def time_us(call: Call, replays: int, calls: int) -> float:
    """Return the median time per call in a CUDA graph of `calls` calls."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(calls):
            call(turn)
    return replay_us(graph.replay, replays) / calls


def time_of_theirs(case: Case, replays: int) -> float | None:
    """Time SGLang's functions: not a public API, so a release may have changed one (None)."""
    assert case.sglang
    try:
        return time_us(case.sglang, replays, case.calls)
    except (TypeError, ValueError, RuntimeError) as fault:
        print(f"{case.op}: SGLang's column stays empty: {fault}", file=sys.stderr)
        return None


def markdown_line(row: OpRow) -> str:
    twin, theirs = ("" if x is None else f"{x:.1f}" for x in (row.twin_us, row.sglang_us))
    return (
        f"| {row.op} | {row.requests} | {row.ours_us:.1f} | {twin} | {theirs} "
        f"| {row.floor_us:.1f} | {row.tb_per_s:.2f} |"
    )
