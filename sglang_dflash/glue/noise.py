"""The noise that the drafts and the target's choices of a step share.

The target draws each token as the highest of its logits after noise (`kernels/noise.py`). Drafts
that are drawn with the same noise fall on the target's token more often than the likeliest ones do,
where the target is uncertain. Nothing becomes less exact: a row's noise is independent of the
tokens before it, and the target's choice is a draw from its own distribution whatever was drafted.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.glue.sampling import is_adjusted
from sglang_dflash.kernels import MAX_TOP_K, Noise

# what SGLang takes for no top_k
TOP_K_ALL = 1 << 30


class StepNoise:
    """Noise of the largest batch, at fixed addresses, which captured draft graphs read."""

    def __init__(self, max_requests: int, block_size: int, device: torch.device | str) -> None:
        keys = torch.zeros(max_requests, block_size, dtype=torch.int64, device=device)
        self._whole = Noise(keys, torch.zeros(max_requests, device=device))
        self._on = False

    def room(self, num_requests: int) -> Noise:
        """Return what graphs of so many requests read: without effect while it is not drawn."""
        return Noise(*(each[:num_requests] for each in self._whole))

    def draw(self, batch: Any) -> Noise | None:
        """Draw for a step; return None, with the room without effect, if our kernels cannot draw
        all that the batch samples."""
        wanted = _is_drawn_by_kernels(batch)
        if self._on and not wanted:
            self._whole.scales.zero_()
        self._on = wanted
        if not wanted:
            return None
        info = batch.sampling_info
        noise = self.room(info.top_ks.shape[0])
        noise.keys.random_()
        # top_k 1 is how SGLang spells greedy
        noise.scales.copy_(torch.where(info.top_ks == 1, 0.0, info.temperatures.flatten()))
        return noise


def _is_drawn_by_kernels(batch: Any) -> bool:
    """Tell whether every request draws from all tokens or from few, by top_k and top_p, and without
    a seed."""
    info = batch.sampling_info
    return not (
        info.is_all_greedy
        or is_adjusted(batch)
        or info.sampling_seed is not None
        or info.need_min_p_sampling
        or any(info.return_sampling_masks or ())
    ) and all(_is_few_or_all(req.sampling_params) for req in batch.reqs)


def _is_few_or_all(params: Any) -> bool:
    return params.top_k <= MAX_TOP_K or (params.top_k >= TOP_K_ALL and params.top_p == 1.0)
