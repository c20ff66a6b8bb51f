"""A plug-in for tests without a GPU: host memory that no GPU has to reach.

SGLang registers what it captures for clients, such as the experts of each token, with CUDA. With
PAGEABLE_HOST=1 a server on a CPU keeps it in plain memory instead.
"""

from __future__ import annotations

import os
from typing import Any


def activate() -> None:
    if os.environ.get("PAGEABLE_HOST") != "1":
        return
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def allocate(dims: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **_: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)
