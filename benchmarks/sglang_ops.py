"""SGLang's counterparts of our ops. They are not a public API: a release may change one."""

from __future__ import annotations

import sys
from typing import final

import torch


@final
class SGLang:
    """The functions that SGLang runs for the same work."""

    def __init__(self) -> None:
        from flashinfer.sampling import top_k_top_p_sampling_from_probs
        from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace
        from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton
        from sglang.kernels.ops.kvcache.kvcache import store_cache
        from sglang.kernels.ops.layernorm import fused_add_rmsnorm, rmsnorm
        from sglang.kernels.ops.layernorm.gemma4_fused_ops import (
            gemma_dual_rmsnorm_residual_scalar,
            gemma_qkv_rmsnorm,
            gemma_rmsnorm_residual_scalar,
        )
        from sglang.kernels.ops.speculative import dflash
        from sglang.kernels.ops.speculative.fused_kv_materialize import _fused_norm_rope_stacked
        from sglang.srt.layers.logits_processor import fused_softcap

        self.softcap, self.top_k_top_p = fused_softcap, top_k_top_p_sampling_from_probs
        self.rope = apply_rope_with_cos_sin_cache_inplace
        self.kv_indices = create_flashinfer_kv_indices_triton
        self.store_cache = store_cache
        self.fused_add_rmsnorm, self.rmsnorm = fused_add_rmsnorm, rmsnorm
        self.qkv_rmsnorm = gemma_qkv_rmsnorm
        self.rmsnorm_residual = gemma_rmsnorm_residual_scalar
        self.dual_rmsnorm = gemma_dual_rmsnorm_residual_scalar
        self.dflash = dflash
        self.norm_and_rope = _fused_norm_rope_stacked

    @classmethod
    def find(cls) -> SGLang | None:
        if not torch.cuda.is_available():
            return None
        try:
            return cls()
        except ImportError as missing:
            print(f"SGLang's column stays empty: {missing}", file=sys.stderr)
            return None
