"""What surrounds the gated delta rule in a layer, in plain torch: projections, norms, gates."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split both projections of a layer into its convolution's input, output gate, b and a."""
    values = v_heads * v_dim
    qkv, z = qkvz.split([2 * k_heads * k_dim + values, values], -1)
    b, a = ba.split([v_heads, v_heads], -1)
    return qkv.contiguous(), z.unflatten(-1, (v_heads, v_dim)), b.contiguous(), a.contiguous()


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply the attention's output by its gate, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Normalise each head of the queries and keys, [n * heads, D] each."""
    q, k = (x.reshape(-1, head_dim) for x in (q, k))
    return _gemma_norm(q, q_weight, eps), _gemma_norm(k, k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same for queries that alternate with the output's gates, head by head."""
    q, gate = q_gate.unflatten(-1, (heads, 2 * head_dim)).chunk(2, -1)
    normed = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return *normed, gate.contiguous().view(-1, head_dim)


def _gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), eps).to(x.dtype)
