"""Every kernel has the signature of its torch twin: callers do not know which one runs."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature

import pytest
import torch

from sglang_dflash.kernels import Ops, cards, pdl
from sglang_dflash.kernels.attention import reference
from sglang_dflash.kernels.attention.verify import VerifyAttention
from sglang_dflash.kernels.cards import Card
from sglang_dflash.kernels.gpu_ops import TritonOps

OPS = sorted(name for name, value in vars(Ops).items() if isinstance(value, staticmethod))


def without_self(method: Callable[..., object]) -> Signature:
    found = signature(method)
    return found.replace(parameters=list(found.parameters.values())[1:])


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_has_the_signature_of_its_twin(op: str) -> None:
    """Names, order, kinds, defaults and annotations."""
    twin, kernel = getattr(Ops, op), getattr(TritonOps, op)
    assert kernel is not twin, "a GPU would run the twin"
    assert signature(kernel) == signature(twin)


def test_verify_attention_has_the_signature_of_its_twin() -> None:
    assert TritonOps.verify_attention is VerifyAttention
    assert without_self(VerifyAttention.run) == signature(reference.verify_attention)


def test_each_op_says_what_runs_it() -> None:
    """Thin GEMMs, which fall back by shape, name the shapes that our kernel serves."""
    found = TritonOps().describe()
    assert set(found) == {*OPS, "verify_attention"}
    products = found.pop("thin_linear")
    assert set(found.values()) == {"sglang_dflash.triton"}
    assert "5376 x 21504; other GEMMs run in the library" in products


def test_thin_products_are_left_to_the_library_on_a_card_without_measurements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cards, "current", lambda: Card((8, 9)))
    x = torch.empty(16, 8192, dtype=torch.bfloat16, device="meta")
    assert TritonOps().thin_linear(x, x.new_empty(5376, 8192)) is None
    told = TritonOps().describe()["thin_linear"]
    assert told == "library (not measured on compute capability 8.9, 99 KiB per block)"


def test_dependent_launches_begin_with_hopper() -> None:
    able = [card for card in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)) if Card(card).has_pdl]
    assert able == [(9, 0), (10, 0), (12, 0)]
    assert pdl.options_on(Card((8, 9))) == {"PDL": False}
    assert pdl.options_on(Card((9, 0))) == {"PDL": True, "launch_pdl": True}


def test_whatever_ops_names_is_compared() -> None:
    public = {name for name in vars(Ops) if not name.startswith("_")}
    assert public - set(OPS) == {"name", "describe", "verify_attention"}
