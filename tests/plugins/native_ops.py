"""A plug-in for tests on a GPU: SGLang's layers in plain torch, so that fp32 runs.

SGLang's fused norm and activation kernels and its prefill of linear attention support half
precision only, and the tiles of its attention kernels exceed shared memory at large head dims in
fp32. The exactness tests need fp32, where the difference between two correct computations is far
smaller than that between two tokens.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import sglang_dflash


def activate() -> None:
    if os.environ.get("NATIVE_OPS") != "1":
        return
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    if hasattr(MultiPlatformOp, "dispatch_forward"):
        _dispatch_to_native(MultiPlatformOp)
    else:
        # newer releases have a switch
        from sglang.kernels.fused_op import KernelBackend, set_fused_op_backend

        set_fused_op_backend(KernelBackend.TORCH)
        _prefill_linear_attention_in_torch()
    # as in a CPU server: experts with any activation, Gemma 4's router with its scale
    from sglang_dflash.glue.cpu import experts, norms

    experts.install()
    norms.install_router_norm()
    _shrink_attention_tiles()


def _dispatch_to_native(kind: Any) -> None:
    dispatch = kind.dispatch_forward

    def dispatch_forward(self: Any) -> Any:
        has_native = type(self).forward_native is not kind.forward_native
        return self.forward_native if has_native else dispatch(self)

    kind.dispatch_forward = dispatch_forward


def _prefill_linear_attention_in_torch() -> None:
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    prefill = gdn_triton.chunk_gated_delta_rule
    in_torch = gated_delta_rule().chunk_gated_delta_rule_cpu

    def choose(*, q: Any, **named: Any) -> Any:
        return (in_torch if q.element_size() == 4 else prefill)(q=q, **named)

    gdn_triton.chunk_gated_delta_rule = choose


def gated_delta_rule() -> ModuleType:
    """Return the recurrence of CPU servers, which runs on any device. It is part of a stand-in for
    sgl_kernel, so by name it is found on a CPU only."""
    file = Path(sglang_dflash.__file__).parent / "glue/cpu/path/sgl_kernel/mamba.py"
    spec = importlib.util.spec_from_file_location("gated_delta_rule", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _shrink_attention_tiles() -> None:
    from sglang.kernels.ops.attention import decode_attention, extend_attention

    choose = extend_attention._get_block_sizes_for_extend_attention

    def choose_small(*args: int, **named: int) -> tuple[int, ...]:
        *dims, _block_m, _block_n, num_warps = choose(*args, **named)
        return (*dims, 16, 32, num_warps)

    extend_attention._get_block_sizes_for_extend_attention = choose_small
    kernel = decode_attention._fwd_grouped_kernel_stage1
    launch = kernel.run

    def launch_small(*args: Any, **named: Any) -> Any:
        return launch(*args, **{**named, "BLOCK_N": 16, "num_stages": 1})

    kernel.run = launch_small
