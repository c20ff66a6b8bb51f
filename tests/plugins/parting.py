"""A plug-in for tests: a rank that parts from the others.

PARTING names a file. While there is one, rank 1 of a tensor-parallel server decides for itself: by
the file's text its steps have another width (`width`), or commit another token (`token`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def activate() -> None:
    if "PARTING" not in os.environ:
        return
    import torch

    from sglang_dflash.glue.step.agreement import Agreement

    file = Path(os.environ["PARTING"])
    agreed_choice, overwrite = Agreement.choice, Agreement.overwrite

    def parts_by(what: str) -> bool:
        is_other = torch.distributed.get_rank() == 1
        return is_other and file.exists() and file.read_text() == what

    def choice(self: Any, own: Any) -> Any:
        agreed = agreed_choice(self, own)
        if not parts_by("width"):
            return agreed
        return agreed._replace(width=agreed.width - 1 if agreed.width > 1 else 2)

    def decide(self: Any, *decisions: Any) -> None:
        overwrite(self, *decisions)
        if parts_by("token"):
            decisions[0].add_(1)

    Agreement.choice, Agreement.overwrite = choice, decide
