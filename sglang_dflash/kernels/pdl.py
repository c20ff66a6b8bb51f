"""Programmatic dependent launch (PDL): a kernel begins while the one before it ends.

Hopper and later GPUs have it. A kernel launched so must wait (`gdc_wait`) before it touches what an
earlier kernel wrote, or writes what an earlier kernel reads. `gdc_launch_dependents` lets the next
launch begin.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def launch_options(device_type: str) -> dict[str, Any]:
    """Return the launch options of a kernel that has the constant PDL."""
    able = device_type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
