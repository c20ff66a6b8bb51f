"""A small, untrained oracle drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang_dflash.reference.model import FULL, SLIDING, Drafter, DrafterConfig

CONFIG = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
    block_size=8,
    num_target_layers=4,
    mask_token_id=3,
    target_layer_ids=(0, 2),
    layer_types=(SLIDING, FULL),
    sliding_window=6,
)


def make_drafter(**changes: Any) -> Drafter:
    torch.manual_seed(1)
    return Drafter(replace(CONFIG, **changes)).eval().requires_grad_(False)
