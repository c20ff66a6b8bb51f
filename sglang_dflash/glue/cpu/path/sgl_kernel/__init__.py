"""Stand-in for SGLang's kernel package, which has no CPU build on the package index.

Holds the functions that a DFLASH server on a CPU calls. Any other name can be imported, as SGLang
does at the top of its modules, and raises NotImplementedError when called.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import Tensor

if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
    raise ImportError(
        "this sgl_kernel is sglang_dflash's CPU stand-in, but SGLANG_USE_CPU_ENGINE is not 1; to "
        f"serve on a GPU, remove {os.path.dirname(os.path.dirname(__file__))} from PYTHONPATH"
    )

__version__ = "0.0.0+sglang.dflash.cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    *_unused: Any,
) -> None:
    """Write newly allocated slots into each request's row, from its start to its end column."""
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy KV rows within each buffer, given its address and row size in bytes."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # read all rows before writing any: a target may be another row's source
        rows = [ctypes.string_at(base + row * row_bytes, row_bytes) for row in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * row_bytes, row, row_bytes)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return absent
