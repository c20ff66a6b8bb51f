"""The GPU under test: name, memory, bandwidth, FLOP/s, and how work on it is timed."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    name: str
    bandwidth: float  # bytes per second, reads plus writes
    flops: float  # per second, dense bf16
    l2_bytes: int


def measure_gpu() -> Gpu:
    properties = torch.cuda.get_device_properties(0)
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_us = replay_us(lambda: target.copy_(source), 20)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_us = replay_us(lambda: a @ b, 10)
    return Gpu(
        name=properties.name,
        bandwidth=2 * source.nbytes / copy_us * 1e6,
        flops=2 * 8192**3 / product_us * 1e6,
        l2_bytes=properties.L2_cache_size,
    )


def replay_us(work: Callable[[], object], repeats: int) -> float:
    """Return the median GPU time of `work`, in microseconds."""
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


def gpu_name() -> str:
    """Return the GPU's name, if possible without torch, whose context takes servers' memory."""
    return query("name") or torch.cuda.get_device_name()


def memory_gib() -> float:
    """Return the size of the GPU's memory in GiB."""
    mib = query("memory.total")
    return float(mib) / 1024 if mib else torch.cuda.get_device_properties(0).total_memory / 2**30


def free_gib() -> float:
    """Return how much of the GPU's memory no process has taken, in GiB."""
    mib = query("memory.free")
    return float(mib) / 1024 if mib else torch.cuda.mem_get_info()[0] / 2**30


def query(what: str) -> str | None:
    """Query nvidia-smi about the first GPU; return None without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError):
        found = subprocess.run(query, capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.splitlines()[0].strip()
    return None
