"""What a card offers to kernels, by its compute capability. Tiles are chosen by this alone.

Tensor cores differ in where a product's operands and result live. Ampere, Ada and consumer
Blackwell (`mma`) keep all of them in registers, so that large tiles spill. Hopper (`wgmma`) reads
operands from shared memory. Data-centre Blackwell (`tcgen05`) also accumulates in a memory of its
own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

KIB = 1024
# the most shared memory that a block can ask for: CUDA programming guide, "Technical
# Specifications per Compute Capability"
SHARED_MEMORY = {
    (7, 5): 64 * KIB,  # T4, RTX 20
    (8, 0): 163 * KIB,  # A100
    (8, 6): 99 * KIB,  # RTX 30, A40
    (8, 7): 163 * KIB,  # Orin
    (8, 9): 99 * KIB,  # RTX 40, L40
    (9, 0): 227 * KIB,  # H100, H200
    (10, 0): 227 * KIB,  # B200
    (10, 3): 227 * KIB,  # B300
    (11, 0): 227 * KIB,  # Thor
    (12, 0): 99 * KIB,  # RTX 50, RTX PRO 6000
    (12, 1): 99 * KIB,  # DGX Spark
}


@dataclass(frozen=True)
class Card:
    """A GPU, as far as kernels depend on it."""

    capability: tuple[int, int]

    @property
    def shared_memory(self) -> int:
        """Bytes that a block can ask for. A card that is not listed gets what most cards have."""
        return SHARED_MEMORY.get(self.capability, 99 * KIB)

    @property
    def tensor_cores(self) -> str:
        return {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}.get(self.capability[0], "mma")

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel can start while the previous one finishes (`pdl.py`)."""
        return self.capability >= (9, 0)

    @property
    def has_e4m3(self) -> bool:
        """Whether Triton converts from and to this FP8 type; e5m2 it converts on any card."""
        return self.capability >= (8, 9)

    def __str__(self) -> str:
        major, minor = self.capability
        return f"compute capability {major}.{minor}, {self.shared_memory // KIB} KiB per block"


# every tile without another note was tuned on an H200
TUNED_ON = Card((9, 0))


@functools.cache
def current() -> Card:
    """Return this machine's card. Without a GPU, where kernels are interpreted, the tuned one."""
    return Card(torch.cuda.get_device_capability()) if torch.cuda.is_available() else TUNED_ON
