"""The ops of a step, chosen once at startup. Tensors in, tensors out.

Each family of ops has a folder with its Triton kernels and, in `reference.py`, their torch twins,
which specify what the kernels compute. `ops.py` binds every op to its twin, `gpu_ops.py` to its
kernel.
"""

from __future__ import annotations

from sglang_dflash.kernels.accept.reference import COUNT_MATCHES, SCRATCH_SLOT
from sglang_dflash.kernels.logits.reference import Noise
from sglang_dflash.kernels.ops import Ops
from sglang_dflash.kernels.sampling.reference import MAX_TOP_K

__all__ = [
    "COUNT_MATCHES",
    "MAX_TOP_K",
    "SCRATCH_SLOT",
    "TORCH",
    "Noise",
    "Ops",
    "choose",
    "triton_ops",
]

TORCH = Ops()


def choose(device_type: str) -> Ops:
    """Return the ops for a device. The caller logs what runs each op."""
    if device_type == "cpu":
        return TORCH
    if device_type != "cuda":
        raise ValueError(f"sglang_dflash has no ops for device {device_type!r}; it has cpu, cuda.")
    return triton_ops()


def triton_ops() -> Ops:
    """Return the Triton kernels, each in place of its twin."""
    from sglang_dflash.kernels.gpu_ops import TritonOps

    return TritonOps()
