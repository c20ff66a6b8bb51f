"""The GPU that kernels are measured on: its own bandwidth and arithmetic, and how time is taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    name: str
    bandwidth: float  # bytes a second, read and written
    flops: float  # of dense bf16
    l2_bytes: int


def measure_card() -> Card:
    properties = torch.cuda.get_device_properties(0)
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_us = replay_us(lambda: target.copy_(source), 20)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_us = replay_us(lambda: a @ b, 10)
    return Card(
        name=properties.name,
        bandwidth=2 * source.nbytes / copy_us * 1e6,
        flops=2 * 8192**3 / product_us * 1e6,
        l2_bytes=properties.L2_cache_size,
    )


def replay_us(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of some work on the GPU."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)
