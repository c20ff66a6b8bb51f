"""Linear layers with 4-bit and 8-bit weights, without a GPU.

SGLang's GEMMs of packed weights need a GPU. Here each weight is unpacked once, after loading. The
packed one is kept, too, because a weight update writes to it. Integers in the compressed-tensors
format and AWQ are served.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sglang_dflash.glue import changes
from sglang_dflash.glue.changes import Hook
from sglang_dflash.glue.cpu import products

WORD_BITS = 32
AWQ_BITS = 4
# a word of AWQ has the columns 0, 2, 4, 6, 1, 3, 5, 7, from its lowest bits up
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

LAYER = changes.Fields(
    "quantised layers of a CPU server", {"unpacked_weight": "the weight as GEMMs in torch need it"}
)


def install() -> None:
    """Serve quantised targets on a CPU, in fp32."""
    unpacks, multiplies = "unpacks the weight: its GEMM needs a GPU", "multiplies in torch"
    changes.attach(
        {
            "compressed_dtypes": Hook(_and_fp32, "torch multiplies in fp32, too"),
            "awq_dtypes": Hook(_and_fp32, "torch multiplies in fp32, too"),
            "compressed_scheme_supported": Hook(
                lambda *_arguments, **_options: True, "its schemes ask for a kind of GPU"
            ),
            "compressed_process": Hook(_unpack_compressed, unpacks),
            "compressed_multiply": Hook(_multiply, multiplies),
            "awq_process": Hook(_unpack_awq, unpacks),
            "awq_multiply": Hook(_multiply, multiplies),
        }
    )


def _and_fp32(original: Any, config: Any) -> list[torch.dtype]:
    return [*original(config), torch.float32]


def _unpack_compressed(_original: Any, scheme: Any, layer: Any) -> None:
    if scheme.has_g_idx:
        raise NotImplementedError(
            "This compressed-tensors target has an activation order (actorder: group), which CPU "
            "mode does not read. Serve it on a GPU."
        )
    bits = WORD_BITS // scheme.pack_factor
    values = unpack(layer.weight_packed.data, bits)
    zeros: Tensor | int = 1 << (bits - 1)
    if not scheme.symmetric:
        # packed along the outputs
        packed = layer.weight_zero_point.data
        zeros = unpack(packed.t(), bits).t()
    LAYER.write(layer, unpacked_weight=_scaled(values, zeros, layer.weight_scale.data))


def _unpack_awq(_original: Any, _kernel: Any, layer: Any) -> None:
    values, zeros = (unpack_awq(packed.data).t() for packed in (layer.qweight, layer.qzeros))
    LAYER.write(layer, unpacked_weight=_scaled(values, zeros, layer.scales.data.t()))


def _scaled(
    values: Tensor,  # [N, K]
    zeros: Tensor | int,  # [N, G]
    scales: Tensor,  # [N, G], one for each group of K / G values
) -> Tensor:
    """Return the weight, [N, K]."""
    groups = values.unflatten(1, (scales.shape[1], -1))
    offsets = zeros if isinstance(zeros, int) else zeros[..., None]
    return ((groups - offsets) * scales[..., None]).flatten(1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned values of int32 words along the last dimension, lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def unpack_awq(words: Tensor) -> Tensor:
    """Return AWQ's values in the order of their columns."""
    return unpack(words, AWQ_BITS).unflatten(-1, (-1, len(AWQ_PLACES)))[..., AWQ_PLACES].flatten(-2)


def _multiply(
    _original: Any, _scheme: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    weight = layer.unpacked_weight
    product = products.multiply(x, weight, bias)
    return functional.linear(x, weight, bias) if product is None else product
