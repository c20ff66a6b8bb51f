"""The target's embedding: for its drafter, and for prompts given as embeddings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dflash.glue import compat

# what decoders call it, beside a method that returns it
NAMES = ("embed_tokens", "word_embeddings", "tok_embeddings", "wte", "embedding")


def input_embedding(model: Any) -> nn.Module:
    """Return the module that embeds a target's tokens, without adapters. Raise ValueError if there
    is none."""
    get = getattr(model, "get_input_embeddings", None)
    # in some classes a method of this name embeds the tokens it is given
    if get is not None and not inspect.signature(get).parameters:
        return without_adapters(get())
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in NAMES and "vis" not in name:
            return without_adapters(module)
    raise ValueError(
        f"{type(model).__name__} has no embedding under a known name ({', '.join(NAMES)}), which a "
        "drafter shares. Serve it without --speculative-algorithm DFLASH."
    )


def without_adapters(module: Any) -> Any:
    """Return the target's own module, from one that may be wrapped for LoRA: the wrapper's kernels
    read which rows have which adapter, of the target's last batch."""
    return module.base_layer if isinstance(module, compat.BaseLayerWithLoRA) else module


def embed_all(batch: Any, embed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return embeddings of all prompt tokens; SGLang supplies them for some requests only."""
    given = torch.tensor([req.input_embeds is not None for req in batch.reqs])
    if given.all():
        return batch.input_embeds
    rows = embed(batch.input_ids).float()
    is_given = given.repeat_interleave(torch.tensor(batch.extend_lens)).to(rows.device)
    rows[is_given] = batch.input_embeds
    return rows


def unscaled(embedding: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a target's embedding without the scaling that some targets apply to it."""
    if isinstance(embedding, compat.VocabParallelEmbedding):
        return functools.partial(compat.VocabParallelEmbedding.forward, embedding)
    return lambda ids: nn.functional.embedding(ids, embedding.get_parameter("weight"))


def masked(
    embed: Callable[[Tensor], Tensor],
    token: int,
    row: Tensor,  # [H]
) -> Callable[[Tensor], Tensor]:
    """Return an embedding in which one token has another row."""

    def forward(ids: Tensor) -> Tensor:
        return torch.where((ids == token)[..., None], row, embed(ids).to(row.dtype))

    return forward


@torch.no_grad()
def refuse_scaling(embedding: nn.Module, name: str) -> None:
    """Raise ValueError if a target scales its embedding."""
    some = torch.arange(2, device=embedding.get_parameter("weight").device)
    if not torch.equal(embedding(some), unscaled(embedding)(some)):
        raise ValueError(
            f"The drafter {name} has a learned embedding of the mask token, and the target scales "
            "its embeddings. Whether the learned one was trained with the scale is not known, so "
            "sglang_dflash does not serve this pair. Use a drafter without one."
        )
