"""MoE layers without a GPU, where SGLang's torch paths do not match its kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.changes import Hook


def install() -> None:
    """Make experts run on a CPU with any activation, and Gemma 4's router with its scale."""
    changes.attach(
        {
            "unquantized_experts": Hook(_run_in_torch, "supports any activation of the experts"),
            "gemma4_norm": Hook(
                _norm_with_folded_scale, "a router's norm applies its folded scale"
            ),
        }
    )


def _run_in_torch(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Run the experts in torch. The original supports SiLU only; Gemma 4 uses GELU."""
    rows = compat.moe_forward_native(
        layer,
        dispatch_output.hidden_states,
        dispatch_output.topk_output,
        method.moe_runner_config,
    )
    return compat.StandardCombineInput(hidden_states=rows)


def _norm_with_folded_scale(original: Any, norm: Any, x: Tensor) -> Tensor:
    """Apply the weight of a norm without a learned scale, as the kernel does: it is ones, or the
    router's folded scale, which the original ignores."""
    rows = original(norm, x)
    return rows if norm.with_scale else (rows * norm.weight).type_as(x)
