"""Our verify attention in the target's Triton backend.

SGLang's backend asks `verify_splitkv_fwd` first when `use_verify_splitkv` is set, and serves a
block with its prefill kernel when the answer is False. On NVIDIA cards it never asks by itself.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_dflash.glue import compat

logger = logging.getLogger(__name__)


def install_verify_attention(runner: Any, *, max_requests: int, block_size: int) -> str:
    """Let our kernel serve the target's blocks, before graphs are captured; return its name.

    A backend without the seam keeps its own kernel.
    """
    backend = runner.attn_backend
    if not isinstance(backend, compat.TritonAttnBackend):
        return type(backend).__name__
    from sglang_dflash.kernels.verify_attention import LayerShape, VerifyAttention

    shapes = {
        LayerShape(m.tp_q_head_num, m.tp_k_head_num, m.qk_head_dim, m.v_head_dim)
        for m in runner.model.modules()
        if isinstance(m, compat.RadixAttention)
    }
    attention = VerifyAttention(
        max_requests, block_size, shapes=list(shapes), dtype=runner.dtype, device=runner.device
    )
    backend.verify_splitkv_fwd = _Announced(attention)
    backend.use_verify_splitkv = True
    return "sglang_dflash.verify_attention"


class _Announced:
    """The kernel behind SGLang's seam, saying once when it has to leave a block to SGLang."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        served = self._attention(*args, **kwargs)
        if not served and not self._warned:
            self._warned = True
            logger.warning(
                "DFLASH: SGLang's prefill kernel serves verify blocks of query %s, dtype %s: "
                "slower, same result.",
                tuple(args[0].shape),
                args[0].dtype,
            )
        return served
