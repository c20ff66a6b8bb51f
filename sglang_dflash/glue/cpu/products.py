"""GEMMs over one block's rows on a CPU, with weights packed once.

A GEMM of 16 rows reads its weight once, like a single row's, but the library repacks the weight on
every call, which takes about as long as the GEMM. MKL, or oneDNN where torch has no MKL (on Arm),
can keep a packed copy: a second copy of every large weight in memory, for about half the time of a
verify pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue import changes, seams

# in elements; a smaller weight is not worth a copy
MIN_WEIGHT = 1 << 16
HAS_MKL = torch.backends.mkl.is_available()

WEIGHT = changes.Fields(
    "weights of a CPU server", {"packed_for_blocks": "a copy laid out for the GEMMs of a block"}
)


def install() -> None:
    """Use packed weights for blocks in SGLang's linear layers and LM head."""
    why = "the GEMMs of a block use weights laid out for its rows"
    changes.attach(
        {
            "unquantized_linear": changes.Hook(_linear, why),
            "compute_lm_head": changes.Hook(_head, why),
        }
    )


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return x [B, K] times weight [N, K] transposed; None if the packed GEMM does not apply."""
    rows = block_rows()
    if (
        x.shape[:-1] != (rows,)
        or not x.dtype == weight.dtype == torch.float32
        or weight.numel() < MIN_WEIGHT
    ):
        return None
    packed = getattr(weight, "packed_for_blocks", None)
    if packed is None:
        packed = _reorder(weight.detach(), rows)
        WEIGHT.write(weight, packed_for_blocks=packed)
    x = x.contiguous()
    if HAS_MKL:
        return torch.ops.mkl._mkl_linear(x, packed, weight, bias, rows)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def forget_packed(model: torch.nn.Module) -> None:
    """Drop the packed copies of a model's weights, because the weights change or have changed."""
    for weight in model.parameters():
        if hasattr(weight, "packed_for_blocks"):
            WEIGHT.delete(weight, "packed_for_blocks")


def _reorder(weight: Tensor, rows: int | None) -> Tensor:
    if HAS_MKL:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


@functools.cache
def block_rows() -> int | None:
    """Return the number of rows of a block; None without DFLASH, or with neither library."""
    if not (HAS_MKL or torch.backends.mkldnn.is_available()):
        return None
    settings = seams.settings()
    if settings.speculative_algorithm != "DFLASH":
        return None
    return settings.speculative_num_draft_tokens


def _linear(
    original: Any, method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    product = multiply(x, layer.weight, bias)
    return original(method, layer, x, bias) if product is None else product


def _head(
    original: Any,
    processor: Any,
    hidden: Tensor,
    lm_head: Any,
    embedding_bias: Any = None,
    **unusual: Any,
) -> Tensor:
    product = None
    is_plain = embedding_bias is None and not any(v is not None for v in unusual.values())
    if is_plain and not processor.use_fp32_lm_head:
        product = multiply(hidden, lm_head.weight)
    if product is None:
        return original(processor, hidden, lm_head, embedding_bias, **unusual)
    return product
