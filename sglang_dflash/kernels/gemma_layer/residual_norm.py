"""All ops between two GEMMs of a Gemma layer, in one launch.

Fusion. The partial sums of a split-K GEMM are reduced. The sum is normalised, added to the residual
and scaled. The result is stored as the new residual and normalised again for the next GEMM. A layer
does this twice, which takes six launches unfused. In a layer with experts the first one feeds three
GEMMs, and the second joins two branches, each normalised beforehand.

Layout contract: partial_sums [S, n, H], residual and the experts' output [n, H], dense; any float
dtype, computed in fp32.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.kernels import pdl

# maximum number of GEMMs that one sum is normalised for
MAX_FOLLOWING = 3


@triton.jit
def _norm(x, weight, eps, WIDTH: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


# fmt: off
@triton.jit
def _norm_add_norm(
    partial_sums, residual, experts, mlp_weight, experts_weight, norm_weight,
    next_0, next_1, next_2, scale, out, normed, num_rows, eps,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr,
    SCALED: tl.constexpr, FOLLOWING: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    # weights have no dependency: load them while the GEMM finishes
    weight = tl.load(norm_weight + column, mask=live, other=0.0).to(tl.float32)
    if FOLLOWING > 0:
        after = tl.load(next_0 + column, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = row * WIDTH + column
    x = tl.load(partial_sums + at, mask=live, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        partial_sum = partial_sums + split * num_rows * WIDTH + at
        x += tl.load(partial_sum, mask=live, other=0.0).to(tl.float32)
    # round to what a GEMM would have stored
    x = x.to(out.dtype.element_ty).to(tl.float32)
    if JOINED:
        first = tl.load(mlp_weight + column, mask=live, other=0.0).to(tl.float32)
        second = tl.load(experts_weight + column, mask=live, other=0.0).to(tl.float32)
        other = tl.load(experts + at, mask=live, other=0.0).to(tl.float32)
        x = _norm(x, first, eps, WIDTH) + _norm(other, second, eps, WIDTH)
    x = _norm(x, weight, eps, WIDTH)
    x += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    if SCALED:
        x *= tl.load(scale).to(tl.float32)
    stored = x.to(out.dtype.element_ty)
    tl.store(out + at, stored, mask=live)
    x = stored.to(tl.float32)
    for k in tl.static_range(FOLLOWING):
        if k > 0:
            next_weight = next_1 if k == 1 else next_2
            after = tl.load(next_weight + column, mask=live, other=0.0).to(tl.float32)
        found = _norm(x, after, eps, WIDTH).to(normed.dtype.element_ty)
        tl.store(normed + k * num_rows * WIDTH + at, found, mask=live)


def norm_add_norm(
    partial_sums: Tensor,
    residual: Tensor,
    *,
    norm_weight: Tensor,
    next_weights: Sequence[Tensor],
    scale: Tensor | None,
    eps: float,
    expert_branch: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Triton version of `reference.norm_add_norm`."""
    splits, rows, width = partial_sums.shape
    following = len(next_weights)
    assert following <= MAX_FOLLOWING, following
    dense = (partial_sums, residual, *(expert_branch or ())[:1])
    assert all(t.is_contiguous() for t in dense), [t.stride() for t in dense]
    out = torch.empty_like(residual)
    normed = residual.new_empty(following, rows, width)
    after = [*next_weights, *[None] * (MAX_FOLLOWING - following)]
    _norm_add_norm[(rows,)](
        *(partial_sums, residual, *(expert_branch or [None] * 3), norm_weight, *after),
        *(scale, out, normed, rows, eps),
        WIDTH=width,
        SPLITS=splits,
        BLOCK=triton.next_power_of_2(width),
        JOINED=expert_branch is not None,
        SCALED=scale is not None,
        FOLLOWING=following,
        num_warps=8 if width > 1024 else 4,
        **pdl.launch_options(partial_sums.device.type),
    )
    return out, normed
