"""GEMMs of a single block on a CPU: the same results as torch, and used for such blocks only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.glue.cpu import products

ROWS = 16


@pytest.fixture(autouse=True)
def blocks_of_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (torch.backends.mkl.is_available() or torch.backends.mkldnn.is_available()):
        pytest.skip("this torch has neither MKL nor oneDNN")
    monkeypatch.setattr(products, "block_rows", lambda: ROWS)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [False, True])
def test_a_block_multiplies_like_torch(bias: bool) -> None:
    x, weight = draw(ROWS, 300), draw(777, 300)
    added = draw(777) if bias else None
    # packed by the first call, reused by the second
    for _ in range(2):
        found = products.multiply(x, weight, added)
        assert found is not None
        torch.testing.assert_close(found, F.linear(x, weight, added), atol=1e-4, rtol=1e-5)
    # rows sliced from a wider tensor, as hidden states are
    wide = draw(ROWS, 600)
    found = products.multiply(wide[:, ::2], weight)
    assert found is not None
    torch.testing.assert_close(found, F.linear(wide[:, ::2], weight), atol=1e-4, rtol=1e-5)


def test_what_is_no_block_is_left_alone() -> None:
    weight = draw(777, 300)
    assert products.multiply(draw(1, 300), weight) is None
    assert products.multiply(draw(2 * ROWS, 300), weight) is None
    assert products.multiply(draw(1, ROWS, 300), weight) is None
    assert products.multiply(draw(ROWS, 300).bfloat16(), weight.bfloat16()) is None
    assert products.multiply(draw(ROWS, 30), draw(77, 30)) is None
    assert not hasattr(weight, "packed_for_blocks")


def test_a_server_without_blocks_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "block_rows", lambda: None)
    assert products.multiply(draw(ROWS, 300), draw(777, 300)) is None


def test_a_copy_is_forgotten_with_the_weight_it_was_made_of() -> None:
    """SGLang loads new weights into the same tensors, so the update cannot be detected on them."""
    layer = torch.nn.Linear(300, 777, bias=False)
    x = draw(ROWS, 300)
    for seed in (1, 2):
        layer.weight.data.copy_(draw(777, 300) * seed)
        products.forget_packed(layer)
        found = products.multiply(x, layer.weight)
        assert found is not None
        torch.testing.assert_close(found, layer(x), atol=1e-4, rtol=1e-5)
