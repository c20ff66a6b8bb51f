"""AdamW, or Muon for the matrices and AdamW for the rest.

Muon orthogonalises the update of a matrix. In runs of minutes rather than days a drafter gets much
further with it in the same number of steps.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer


def make_optimizers(
    module: nn.Module, kind: str, *, learning_rate: float, weight_decay: float
) -> list[Optimizer]:
    """Return the optimizers for "muon" or "adamw", all with one learning rate."""
    rest = list(module.parameters())
    found: list[Optimizer] = []
    if kind == "muon":
        matrices = [p for p in rest if p.ndim == 2]
        rest = [p for p in rest if p.ndim != 2]
        found.append(
            torch.optim.Muon(
                matrices,
                lr=learning_rate,
                weight_decay=weight_decay,
                # match AdamW's update RMS, so that its learning rates apply
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return [
        *found,
        torch.optim.AdamW(
            rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
        ),
    ]
