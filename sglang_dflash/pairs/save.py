"""Save a trained pair in the checkpoint formats that servers load."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from sglang_dflash.reference.model import Drafter


@torch.no_grad()
def round_to_bfloat16(module: nn.Module) -> None:
    """Round every weight to the nearest bfloat16 in place, keeping its dtype.

    Afterwards the float32 module and its bfloat16 checkpoint hold the same numbers, so measurements
    here are of the weights that will be served.
    """
    for parameter in module.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def export_target(target: PreTrainedModel, folder: Path, *, eos_id: int, pad_id: int) -> None:
    """Write config.json, generation_config.json and bfloat16 safetensors beside the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    target.generation_config = GenerationConfig(eos_token_id=eos_id, pad_token_id=pad_id)
    # transformers wraps `to` in a way that hides its signature; nn.Module's own is typed
    weights: nn.Module = target
    dtype = target.dtype
    weights.to(torch.bfloat16)
    target.save_pretrained(folder)
    weights.to(dtype)


def export_drafter(drafter: Drafter, folder: Path) -> None:
    """Write the drafter in the released checkpoint format: no embedding, no head."""
    drafter.save_pretrained(folder)
