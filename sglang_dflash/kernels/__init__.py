"""The ops of a step, chosen once at start-up. Tensors in, tensors out.

A folder per family of ops has the torch twins, in `reference.py`, beside the Triton kernels; a twin
says what its kernel computes. `ops.py` names every op as its twin, `gpu_ops.py` as its kernel.
"""

from __future__ import annotations

from sglang_dflash.kernels.accept.reference import COUNT_MATCHES
from sglang_dflash.kernels.logits.reference import Noise
from sglang_dflash.kernels.ops import Ops
from sglang_dflash.kernels.sampling.reference import MAX_TOP_K

__all__ = ["COUNT_MATCHES", "MAX_TOP_K", "TORCH", "Noise", "Ops", "choose", "triton_ops"]

TORCH = Ops()


def choose(device_type: str) -> Ops:
    """Return the ops for a device. The caller logs what they run as."""
    if device_type == "cpu":
        return TORCH
    if device_type != "cuda":
        raise ValueError(f"sglang_dflash has no ops for device {device_type!r}; it has cpu, cuda.")
    return triton_ops()


def triton_ops() -> Ops:
    """Return the Triton kernels, each in the place of its twin."""
    from sglang_dflash.kernels.gpu_ops import TritonOps

    return TritonOps()
