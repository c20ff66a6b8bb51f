"""The kernels of a whole layer, at few rows, against their torch twins."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.kernels.gemma_layer import reference
from tests.kernels.interpreter import DEVICE, INTERPRETED, hold_in_the_interpreter, runs_kernel

if INTERPRETED or torch.cuda.is_available():
    from sglang_dflash.kernels.gemma_layer.qkv_norm import norm_and_rotate_qkv
    from sglang_dflash.kernels.gemma_layer.residual_norm import norm_add_norm
    from sglang_dflash.kernels.gemma_layer.thin_linear import Tile, multiply

TYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@runs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 16, 23, 64])
@pytest.mark.parametrize("splits", [1, 3])
def test_parts_of_a_thin_product_add_up(splits: int, rows: int, dtype: torch.dtype) -> None:
    """Split-K with seven K blocks in three splits, and a width that no tile divides."""
    torch.manual_seed(rows)
    x, weight = draw(rows, 224, dtype=dtype), draw(200, 224, dtype=dtype)
    parts = multiply(x, weight, Tile(64, 32, splits, 4, 3, prefetch=64))
    assert parts.shape == (splits, rows, 200)
    exact = x.double() @ weight.double().T
    # fp32 sums of 224 products of order one; a single split is rounded to x's dtype
    assert parts.dtype == (dtype if splits == 1 else torch.float32)
    rounding = 1e-4 if parts.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(parts.sum(0).double(), exact, atol=2e-4, rtol=rounding)
    assert (reference.thin_linear(x, weight)[0].double() - exact).abs().max() < 0.5


@runs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 2, 64), (8, 1, 512), (3, 3, 40)])
def test_norm_and_rotate_qkv(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    angles = torch.arange(50)[:, None] * 1000.0 ** (-torch.arange(dim // 2) / dim)
    arguments = {
        "q_weight": draw(dim, dtype=dtype),
        "k_weight": draw(dim, dtype=dtype),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE),
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "eps": 1e-6,
    }
    positions = torch.randint(0, 50, (5,), device=DEVICE)
    # a slice of a wider buffer, whose other columns must not change
    wide = draw(5, (q_heads + 2 * kv_heads) * dim + 7, dtype=dtype)
    found, expected = wide.clone(), wide.clone()
    norm_and_rotate_qkv(found[:, :-7], positions, **arguments)
    reference.norm_and_rotate_qkv(expected[:, :-7], positions, **arguments)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert (found[:, -7:] == wide[:, -7:]).all()


@runs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("following", [0, 1, 3])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_norm_add_norm(experts: bool, following: int, splits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(splits)
    parts = draw(splits, 7, 600, dtype=torch.float32 if splits > 1 else dtype)
    residual = draw(7, 600, dtype=dtype)
    arguments = {
        "norm_weight": draw(600, dtype=dtype),
        "next_weights": [draw(600, dtype=dtype) for _ in range(following)],
        "scale": torch.tensor([0.7], device=DEVICE, dtype=dtype) if following < 3 else None,
        "eps": 1e-6,
        "expert_branch": (draw(7, 600, dtype=dtype), draw(600, dtype=dtype), draw(600, dtype=dtype))
        if experts
        else None,
    }
    found = norm_add_norm(parts, residual, **arguments)
    expected = reference.norm_add_norm(parts, residual, **arguments)
    # one ulp where the summation order differs
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


if not INTERPRETED:

    def test_layer_kernels_hold_in_the_interpreter() -> None:
        hold_in_the_interpreter(__file__)
