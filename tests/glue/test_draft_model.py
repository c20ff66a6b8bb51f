"""A drafter's weights at any tensor-parallel size: whole in the checkpoint, sharded over ranks."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from sglang_dflash.glue import compat
from sglang_dflash.glue.models.draft_model import (
    DFlashDraftModel,
    _our_name,
    tell_heads_of_each_rank,
)
from sglang_dflash.pairs import tiny_drafter
from tests.tiny_models import make_drafter

# four query and two KV heads: at 4 every KV head is replicated on two ranks
TP_SIZES = [1, 2, 4]
PARTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def as_rank(rank: int, size: int) -> AbstractContextManager[Any]:
    """Make this process one rank of a tensor-parallel group, without a group."""
    groups = ("tp", "attn_tp", "moe_tp")
    sizes = {f"{group}_size": size for group in groups}
    return compat.get_parallel().override(**sizes, **{f"{group}_rank": rank for group in groups})


def build(
    tp_size: int,
    tp_rank: int,
    config: Any = None,
    model: type[DFlashDraftModel] = DFlashDraftModel,
    quantisation: Any = None,
) -> DFlashDraftModel:
    """Return an empty drafter as rank `tp_rank` of `tp_size` builds it."""
    from sglang.srt.runtime_context import get_context

    config = config or AutoConfig.from_pretrained(tiny_drafter())
    with get_context().override_server_args(device="cpu"), as_rank(tp_rank, tp_size):
        return model(config, quantisation)


def checkpoint(folder: Path | None = None) -> dict[str, Tensor]:
    weights = load_file((folder or tiny_drafter()) / "model.safetensors")
    return {name: tensor.float() for name, tensor in weights.items()}


def padded(folder: Path, tp_size: int) -> Any:
    """Return a drafter's ModelConfig as SGLang makes it on a CPU, where it pads sharded
    dimensions."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp

    found = ModelConfig(model_path=str(folder), is_draft_model=True)
    return adjust_config_with_unaligned_cpu_tp(found, LoadConfig(), tp_size)


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_ranks_together_hold_the_checkpoint(tp_size: int) -> None:
    weights = checkpoint()
    models = [build(tp_size, rank) for rank in range(tp_size)]
    for model in models:
        model.load_weights(weights.items())
    for index, layers in enumerate(zip(*(model.layers for model in models), strict=True)):
        prefix = f"layers.{index}."
        found: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        for layer in layers:
            own = layer.self_attn
            qkv = own.qkv_proj.weight.split([own.q_size, own.kv_size, own.kv_size])
            gate_up = layer.mlp.gate_up_proj.weight.chunk(2)
            shares = (*qkv, own.o_proj.weight, *gate_up, layer.mlp.down_proj.weight)
            for part, weight in zip(PARTS, shares, strict=True):
                found[part].append(weight)
        copies = max(1, tp_size // 2)
        for part, kept in found.items():
            block = "self_attn" if part in PARTS[:4] else "mlp"
            if part in ("k_proj", "v_proj"):
                assert all(map(torch.equal, kept[::copies], kept[copies - 1 :: copies]))
                kept = kept[::copies]
            whole = torch.cat(kept, dim=1 if part in ("o_proj", "down_proj") else 0)
            torch.testing.assert_close(whole, weights[f"{prefix}{block}.{part}.weight"])


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("part", [*PARTS, "input_layernorm", "fc"])
def test_a_wrong_shape_is_told_whole(tp_size: int, part: str) -> None:
    """The shard loaders would silently pad a tensor that is too small and cut one too large."""
    weights = checkpoint()
    name = next(name for name in weights if f"{part}.weight" in name)
    right = weights[name]
    for wrong in (right[: len(right) // 2], torch.cat([right, right])):
        message = (
            f"{name} of the drafter {tiny_drafter()} has shape {list(wrong.shape)}, but its "
            f"config asks for {list(right.shape)}. Config and weights do not match."
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            build(tp_size, tp_size - 1).load_weights({**weights, name: wrong}.items())


def test_padding_for_a_cpu_is_not_asked_of_the_checkpoint(tmp_path: Path) -> None:
    """One KV head for two ranks, and an MLP width that is not a multiple of 64."""
    folder = make_drafter(tmp_path, num_key_value_heads=1, intermediate_size=200)
    for rank in range(2):
        config = padded(folder, 2).hf_config
        assert (config.num_key_value_heads, config.intermediate_size) == (2, 256)
        model = build(2, rank, config)
        model.load_weights(checkpoint(folder).items())
        assert model.layers[0].self_attn.qkv_proj.weight.shape[0] == (2 + 1 + 1) * 32
        assert model.layers[0].mlp.down_proj.weight.shape[1] == 100


@pytest.mark.parametrize(
    "uneven",
    [
        {"num_attention_heads": 9, "num_key_value_heads": 3},
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        {"intermediate_size": 255},
    ],
    ids=["queries", "keys", "mlp"],
)
def test_a_drafter_that_ranks_cannot_share_is_whole_on_each(
    tmp_path: Path, uneven: dict[str, int]
) -> None:
    folder = make_drafter(tmp_path, **uneven)
    heads = uneven.get("num_attention_heads", 4), uneven.get("num_key_value_heads", 2)
    for rank in range(2):
        found = padded(folder, 2)
        model = build(2, rank, found.hf_config)
        model.load_weights(checkpoint(folder).items())
        for name, tensor in checkpoint(folder).items():
            ours, part = _our_name(name)
            whole = model.get_parameter(ours)
            if part is not None:
                starts = {"q": 0, "k": heads[0] * 32, "v": sum(heads) * 32}
                start = starts[part] if isinstance(part, str) else part * len(tensor)
                whole = whole[start : start + len(tensor)]
            torch.testing.assert_close(whole, tensor)
        with as_rank(rank, 2):
            tell_heads_of_each_rank(found, model.spec)
        assert (found.get_num_attention_heads(2), found.get_num_kv_heads(2)) == heads
        own = model.layers[0].self_attn.attn
        assert (own.tp_q_head_num, own.tp_k_head_num) == heads


class Scaled(torch.nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


@torch.no_grad()
def test_a_learned_mask_takes_the_place_of_the_targets() -> None:
    model = build(1, 0)
    mask, size = model.spec.mask_token_id, model.spec.hidden_size
    embedding, row = torch.nn.Embedding(model.spec.vocab_size, size), torch.randn(size)
    model.share_embedding(embedding, row)
    assert model._embed is not None
    found = model._embed(torch.tensor([mask + 1, mask]))
    assert torch.equal(found, torch.stack([embedding.weight[mask + 1], row]))
    model.share_embedding(embedding)
    assert model._embed is embedding
    with pytest.raises(ValueError, match="the target scales its embeddings"):
        model.share_embedding(Scaled(model.spec.vocab_size, size), row)
