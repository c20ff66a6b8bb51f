"""The random MoE target really routes: otherwise its end-to-end tests would show little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_configs import NUM_EXPERTS, VOCAB
from tests.tiny_models import load_target, make_target

ROWS = 64
BLOCK = 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder: Path = tmp_path_factory.mktemp("moe")
    return load_target("gemma4-moe", make_target("gemma4-moe", folder))


@pytest.fixture(scope="module")
def token_ids() -> Tensor:
    return torch.randint(3, VOCAB, (1, ROWS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def run(target: PreTrainedModel, token_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the greedy token of each row, and the experts of each row in every layer."""
    chosen: list[Tensor] = []
    handles = [
        layer.router.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
        for layer in target.model.layers
    ]
    tokens = target(token_ids).logits[0].argmax(-1)
    for handle in handles:
        handle.remove()
    return tokens, chosen


def test_rows_of_a_block_go_to_different_experts(
    target: PreTrainedModel, token_ids: Tensor
) -> None:
    _, chosen = run(target, token_ids)
    assert len(chosen) == len(target.model.layers)
    for experts in chosen:
        assert experts.unique().numel() == NUM_EXPERTS
        pairs = {tuple(sorted(row)) for row in experts[:BLOCK].tolist()}
        assert len(pairs) >= 6


@pytest.mark.parametrize("part", ["experts", "scale", "per_expert_scale"])
def test_routing_decides_what_is_written(
    target: PreTrainedModel, token_ids: Tensor, part: str
) -> None:
    """An engine that uses a neighbouring expert, or drops one of the router's scales, is caught."""
    tokens, _ = run(target, token_ids)
    saved = {name: value.clone() for name, value in target.state_dict().items()}
    with torch.no_grad():
        for layer in target.model.layers:
            if part == "experts":
                for weight in layer.experts.parameters():
                    weight.copy_(weight.roll(1, 0))
            else:
                getattr(layer.router, part).fill_(1.0)
    changed, _ = run(target, token_ids)
    target.load_state_dict(saved)
    assert (changed != tokens).sum() > ROWS // 8
