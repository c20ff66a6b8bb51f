"""A plug-in for tests on a GPU: SGLang's layers in plain torch, so that fp32 runs.

SGLang's fused norm and activation kernels support half precision only, and the tiles of its
attention kernels exceed shared memory at large head dims in fp32. The exactness tests need fp32,
where the difference between two correct computations is far smaller than that between two tokens.
"""

from __future__ import annotations

import os
from typing import Any


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
    # as in a CPU server: experts with any activation, Gemma 4's router with its scale
    from sglang_dflash.glue.cpu import experts

    experts.install()
    _shrink_attention_tiles()


def _dispatch_to_native(kind: Any) -> None:
    dispatch = kind.dispatch_forward

    def dispatch_forward(self: Any) -> Any:
        has_native = type(self).forward_native is not kind.forward_native
        return self.forward_native if has_native else dispatch(self)

    kind.dispatch_forward = dispatch_forward


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
