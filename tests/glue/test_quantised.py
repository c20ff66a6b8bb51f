"""Packed weights of quantised targets, unpacked for a server on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from sglang_dflash.glue.cpu import quantised
from tests.quantised_targets import awq_words, pack_awq, pack_int4

GROUP = 32


def layer_of(parts: dict[str, torch.Tensor]) -> SimpleNamespace:
    return SimpleNamespace(**parts)


def scheme(*, bits: int = 4, symmetric: bool = True, ordered: bool = False) -> Any:
    return SimpleNamespace(pack_factor=32 // bits, symmetric=symmetric, has_g_idx=ordered)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_unpacked_as_the_format_packs_them(bits: int) -> None:
    torch.manual_seed(bits)
    values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (6, 64), dtype=torch.int8)
    words = pack_to_int32(values, bits)
    assert torch.equal(quantised.unpack(words, bits) - (1 << bits - 1), values.int())


def test_a_compressed_weight_is_the_rounded_one() -> None:
    torch.manual_seed(0)
    parts, rounded = pack_int4(torch.randn(48, 128), GROUP)
    layer = layer_of(parts)
    quantised._unpack_compressed(None, scheme(), layer)
    assert torch.equal(layer.unpacked_weight, rounded)


def test_zero_points_of_a_compressed_weight_are_subtracted() -> None:
    """They are packed along the outputs, unlike the values."""
    torch.manual_seed(1)
    values = torch.randint(0, 16, (16, 64))
    zeros, scales = torch.randint(0, 16, (16, 2)), torch.rand(16, 2)
    layer = layer_of(
        {
            "weight_packed": pack_to_int32((values - 8).to(torch.int8), 4),
            "weight_zero_point": pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0),
            "weight_scale": scales,
        }
    )
    quantised._unpack_compressed(None, scheme(symmetric=False), layer)
    expected = (values.unflatten(1, (2, 32)) - zeros[..., None]) * scales[..., None]
    assert torch.equal(layer.unpacked_weight, expected.flatten(1))


def test_an_awq_weight_is_the_rounded_one() -> None:
    torch.manual_seed(2)
    parts, rounded = pack_awq(torch.randn(48, 128), GROUP)
    layer = layer_of(parts)
    quantised._unpack_awq(None, None, layer)
    assert torch.equal(layer.unpacked_weight, rounded)


def test_columns_of_an_awq_word_are_interleaved() -> None:
    words = awq_words(torch.arange(8)[None])
    assert words.tolist() == [[0x75316420]]
    assert quantised.unpack_awq(words).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_an_activation_order_is_refused() -> None:
    """Its groups are not runs of inputs, so the weight would be wrong."""
    with pytest.raises(NotImplementedError, match="activation order"):
        quantised._unpack_compressed(None, scheme(ordered=True), layer_of({}))
