"""Which heads of a target a drafter can use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.glue import head
from sglang_dflash.kernels import TORCH

VOCAB, HIDDEN = 100, 16


def draft_head(lm_head: Any) -> head.DraftHead:
    return head.DraftHead(SimpleNamespace(lm_head=lm_head), VOCAB, TORCH)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"weight": torch.zeros(VOCAB, HIDDEN).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"weight": torch.zeros(VOCAB, HIDDEN // 8, dtype=torch.int32)}, "int32"),
        ({"qweight": torch.zeros(VOCAB, HIDDEN // 8, dtype=torch.int32)}, "no weight"),
    ],
    ids=["fp8", "packed", "no weight"],
)
def test_a_quantised_head_is_refused_with_what_it_is(
    tensors: dict[str, torch.Tensor], found: str
) -> None:
    """It would end in an error of torch while graphs are captured, or in the first step."""

    class Fp8LinearMethod:
        pass

    lm_head = SimpleNamespace(**tensors, quant_method=Fp8LinearMethod())
    with pytest.raises(ValueError, match=f"lm_head is quantised .*{found}.* by Fp8LinearMethod"):
        draft_head(lm_head)
