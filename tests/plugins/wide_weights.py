"""A plug-in for tests: random weights under which a wrong computation changes the tokens.

`--load-format dummy` draws every parameter, norms included, from within 0.001 of zero. A layer's
contribution is then negligible, and a server that attends to the wrong keys answers like a correct
one. With WIDE_WEIGHTS=1 weights are as wide as trained ones and seeded by name, so that all servers
with the same shapes have the same weights.
"""

from __future__ import annotations

import os
import zlib
from typing import Any


def activate() -> None:
    if os.environ.get("WIDE_WEIGHTS") != "1":
        return
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw_weights


def draw_weights(model: Any) -> None:
    """Fill a model's floating-point parameters and buffers, identically in every process."""
    import torch

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not torch.is_floating_point(tensor):
                continue
            generator = torch.Generator(device=tensor.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            if tensor.ndim < 2:
                # norms and scales; acceptable for a bias, too
                tensor.uniform_(0.5, 1.5, generator=generator)
                continue
            # logits span about 20, so that two tokens are hardly ever within rounding error
            gain = 5.0 if "embed" in name or "lm_head" in name else 1.5
            tensor.normal_(std=gain * tensor.shape[-1] ** -0.5, generator=generator)
