"""A plug-in for tests on a GPU: a decode step that synchronises with the device is an error."""

from __future__ import annotations

import os
from typing import Any

# graphs and caches are warm by then
FIRST_CHECKED_STEP = 5


def activate() -> None:
    if os.environ.get("SYNC_DEBUG") != "1":
        return
    import torch

    from sglang_dflash.glue.step.worker import DFlashWorker

    decode = DFlashWorker._decode
    steps = 0

    def checked(self: Any, batch: Any, host: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps < FIRST_CHECKED_STEP:
            return decode(self, batch, host)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode(self, batch, host)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    DFlashWorker._decode = checked
