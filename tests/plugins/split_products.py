"""A plug-in for tests on a CPU: products in every form that a kernel may return.

With SPLIT_PRODUCTS=1 they are in turn left to the library, one sum, and several partial sums in
fp32. The same product has another form in the next pass.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

FORMS = ("library", "one", "several", "one", "library")


def activate() -> None:
    if os.environ.get("SPLIT_PRODUCTS") != "1":
        return
    from sglang_dflash.kernels.ops import Ops

    forms = itertools.cycle(FORMS)
    multiply = Ops.thin_linear

    def in_turn(x: Any, weight: Any) -> Any:
        form = next(forms)
        if form == "library":
            return None
        if form == "one":
            return multiply(x, weight)
        import torch

        bounds = [0, x.shape[1] // 4, x.shape[1] // 2, x.shape[1]]
        parts = [
            x[:, begin:end].float() @ weight[:, begin:end].float().T
            for begin, end in itertools.pairwise(bounds)
        ]
        return torch.stack(parts)

    Ops.thin_linear = staticmethod(in_turn)
