"""What stands between two matrix products of a Gemma layer, in one launch.

What is fused. The parts of a product cut along its depth are summed; the sum is normed, added to
the residual and scaled; the result is stored as the new residual and normed once more for the
product that follows. A layer has two of these; separately they are six launches.

Layout contract: parts [S, n, H] and residual [n, H], dense; any float type, computed in fp32.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.kernels.overlap import overlapped


# fmt: off
@triton.jit
def _norm_add_norm(
    parts, residual, norm_weight, next_weight, scale, out, normed, num_rows, eps,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, NORMED: tl.constexpr, OVERLAPPED: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    # weights depend on nothing: they are on their way while the product ends
    weight = tl.load(norm_weight + column, mask=live, other=0.0).to(tl.float32)
    if NORMED:
        after = tl.load(next_weight + column, mask=live, other=0.0).to(tl.float32)
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    at = row * WIDTH + column
    x = tl.load(parts + at, mask=live, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(parts + split * num_rows * WIDTH + at, mask=live, other=0.0).to(tl.float32)
    # what a product would have stored
    x = x.to(out.dtype.element_ty).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight
    x += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    if SCALED:
        x *= tl.load(scale).to(tl.float32)
    stored = x.to(out.dtype.element_ty)
    tl.store(out + at, stored, mask=live)
    if NORMED:
        x = stored.to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * after
        tl.store(normed + at, x.to(normed.dtype.element_ty), mask=live)


def norm_add_norm(
    parts: Tensor,
    residual: Tensor,
    *,
    norm_weight: Tensor,
    next_weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Do what `reference.norm_add_norm` does."""
    splits, rows, width = parts.shape
    assert parts.is_contiguous() and residual.is_contiguous(), (parts.stride(), residual.stride())
    out = torch.empty_like(residual)
    normed = torch.empty_like(residual) if next_weight is not None else out
    _norm_add_norm[(rows,)](
        *(parts, residual, norm_weight, next_weight, scale, out, normed, rows, eps),
        WIDTH=width,
        SPLITS=splits,
        BLOCK=triton.next_power_of_2(width),
        SCALED=scale is not None,
        NORMED=next_weight is not None,
        num_warps=8 if width > 1024 else 4,
        **overlapped(parts.device.type),
    )
    return out, normed
