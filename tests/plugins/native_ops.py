"""A plug-in for tests on a GPU: SGLang's layers in plain torch, so that fp32 runs.

SGLang's fused norm and activation kernels take half precision only. The exactness tests need fp32,
where a difference between two correct computations is far smaller than one between two tokens.
"""

from __future__ import annotations

import os
from typing import Any


def activate() -> None:
    if os.environ.get("NATIVE_OPS") != "1":
        return
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    dispatch = MultiPlatformOp.dispatch_forward

    def dispatch_forward(self: Any) -> Any:
        has_native = type(self).forward_native is not MultiPlatformOp.forward_native
        return self.forward_native if has_native else dispatch(self)

    MultiPlatformOp.dispatch_forward = dispatch_forward
