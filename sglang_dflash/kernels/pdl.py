"""Programmatic dependent launch (PDL): a kernel starts while the previous one finishes.

Available on Hopper and later. Such a kernel must wait (`gdc_wait`) before it accesses data that an
earlier kernel writes, or overwrites data that an earlier kernel reads. `gdc_launch_dependents` lets
the next kernel start.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def launch_options(device_type: str) -> dict[str, Any]:
    """Return the launch options of a kernel with a `PDL` constexpr."""
    able = device_type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
