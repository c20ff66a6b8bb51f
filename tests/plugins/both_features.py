"""A plug-in for tests on a CPU: features that hooks capture, beside those of the target itself.

With BOTH_FEATURES=1 hooks are also installed on targets that capture features themselves. For every
pass, a line in SCRIPT_FOLDER/features.txt says whether both are equal, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def activate() -> None:
    if os.environ.get("BOTH_FEATURES") != "1":
        return
    from sglang_dflash.glue.step.worker import DFlashWorker

    start = DFlashWorker.__init__

    def start_with_hooks(self: Any, *args: Any, **keywords: Any) -> None:
        start(self, *args, **keywords)
        compare(self.model_runner.model, self.config.drafter.target_layer_ids)

    DFlashWorker.__init__ = start_with_hooks


def compare(model: Any, layer_ids: tuple[int, ...]) -> None:
    import torch

    from sglang_dflash.glue.startup.feature_hooks import FeatureHooks

    file = Path(os.environ["SCRIPT_FOLDER"]) / "features.txt"

    class Compared(FeatureHooks):
        def _with_features(self, original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **keywords: Any) -> Any:
                own = keywords.get("aux_hidden_states") if len(args) < 5 else args[4]
                own = own if isinstance(own, torch.Tensor) else torch.cat(own, dim=-1)
                found, self._found = torch.cat(self._found, dim=-1), []
                with file.open("a") as lines:
                    lines.write("equal\n" if torch.equal(own, found) else "different\n")
                return original(*args, **keywords)

            return forward

    Compared(model, layer_ids)
