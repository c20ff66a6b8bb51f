"""MoE layers without a GPU, where SGLang's torch paths do not match its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.changes import Hook


def install() -> None:
    """Make experts run on a CPU with any activation, shared ones, too."""
    changes.attach(
        {
            "unquantized_experts": Hook(
                _run_in_torch, "supports any activation of the experts, and experts of other ranks"
            ),
            "add_shared_expert": Hook(_add_shared_expert, "its kernel needs a GPU"),
        }
    )


def _run_in_torch(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Run the experts in torch. The original supports SiLU only; Gemma 4 uses GELU."""
    rows, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
    run = _run_own if layer.moe_ep_size > 1 else compat.moe_forward_native
    # gpt-oss's activation is marked for torch.compile, which would need a C++ compiler
    with torch.compiler.set_stance("force_eager"):
        out = run(layer, rows, chosen, method.moe_runner_config)
    return compat.StandardCombineInput(hidden_states=out)


def _run_own(layer: Any, hidden: Tensor, chosen: Any, config: Any) -> Tensor:
    """Run this rank's experts, and leave zeros where only experts of others were chosen: SGLang
    then sums over the ranks. It marks the experts of others with -1, for which its torch path has
    no rule."""
    rows, choices = (chosen.topk_ids >= 0).nonzero(as_tuple=True)
    out = torch.zeros_like(hidden)
    if rows.numel() == 0:
        return out
    # one expert for each row
    alone = compat.StandardTopKOutput(
        topk_weights=chosen.topk_weights[rows, choices][:, None],
        topk_ids=chosen.topk_ids[rows, choices][:, None],
        router_logits=chosen.router_logits,
    )
    return out.index_add(0, rows, compat.moe_forward_native(layer, hidden[rows], alone, config))


def _add_shared_expert(
    _original: Any, hidden: Tensor, gate: Tensor, shared: Tensor, experts: Tensor
) -> None:
    """Add the output of the expert that all tokens share, gated, to that of the others."""
    experts.add_((hidden @ gate).sigmoid()[:, None] * shared)
