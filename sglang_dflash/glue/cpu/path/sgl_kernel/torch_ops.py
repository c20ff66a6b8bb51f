"""Stand-ins among torch's operators, where SGLang's modules look for some kernels on import."""

from __future__ import annotations

import torch

from sgl_kernel.gated_layers import (
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_mul_cpu,
)
from sgl_kernel.mamba import fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu

for stand_in in (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
):
    setattr(torch.ops.sgl_kernel, stand_in.__name__, stand_in)
