"""A plug-in for tests: random weights under which a wrong computation changes the tokens.

`--load-format dummy` draws every parameter, norms included, from within 0.001 of zero. A layer's
contribution is then negligible, and a server that attends to the wrong keys answers like a correct
one. With WIDE_WEIGHTS=1 weights are as wide as trained ones and seeded by name, so that all servers
with the same shapes have the same weights. Ranks cut their shards from the weights of one rank.

Gemma's embedding still outweighs its layers then, and greedy answers mostly repeat a token. With
WIDE_WEIGHTS=2 the norms after attention and MLP are as wide as the embedding.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

GAIN, EMBEDDING_GAIN = 1.5, 5.0
# 4-bit weights of compressed-tensors, AWQ and GPTQ: words of eight values, and a scale for each
# group
PACKED = ("weight_packed", "qweight", "qzeros")
SCALES = ("weight_scale", "scales")
VALUES_STD = 4.6  # of integers from -8 to 7, and of FP8 values
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def activate() -> None:
    if os.environ.get("WIDE_WEIGHTS") not in ("1", "2"):
        return
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw_weights


def draw_weights(model: Any) -> None:
    """Fill a model's floating-point parameters and buffers, identically in every process."""
    import torch

    weights = model.state_dict()
    # only Gemma has norms after its MLPs, and with them after attention
    is_gemma = any(POST_NORMS[1] in name for name in weights)
    outputs = POST_NORMS if is_gemma and os.environ["WIDE_WEIGHTS"] == "2" else ()
    with torch.no_grad():
        for name, tensor in weights.items():
            path, _, own_name = name.rpartition(".")
            if own_name in PACKED:
                draw_words(tensor, name)
            if not torch.is_floating_point(tensor):
                continue
            if tensor.itemsize < 2:
                # FP8, which their scales make small; there is no generator for it
                values = torch.empty_like(tensor, dtype=torch.bfloat16)
                tensor.copy_(values.normal_(std=VALUES_STD, generator=generator_of(tensor, name)))
                continue
            if own_name in SCALES:
                draw(tensor.view(-1), name)
                tensor.mul_(GAIN / VALUES_STD * model.get_submodule(path).input_size ** -0.5)
                continue
            dim, parts = shards(model.get_submodule(path), own_name, tensor)
            if not parts:
                draw(tensor, name)
                if own_name == "weight" and path.endswith(outputs):
                    tensor.mul_(EMBEDDING_GAIN)
                continue
            shape = list(tensor.shape)
            shape[dim] = sum(size for size, _ in parts)
            whole = tensor.new_empty(shape)
            draw(whole, name)
            tensor.copy_(cut(whole, dim, parts))


def draw(tensor: Any, name: str) -> None:
    """Fill a tensor that no rank has cut yet."""
    generator = generator_of(tensor, name)
    if name.endswith("correction_bias"):
        # of an expert's score: wide ones would choose the same experts for every token
        tensor.normal_(std=0.05, generator=generator)
        return
    if tensor.ndim < 2:
        # norms and scales; acceptable for a bias, too
        tensor.uniform_(0.5, 1.5, generator=generator)
        return
    # logits span about 20, so that two tokens are hardly ever within rounding error
    gain = EMBEDDING_GAIN if "embed" in name or "lm_head" in name else GAIN
    tensor.normal_(std=gain * tensor.shape[-1] ** -0.5, generator=generator)


def draw_words(tensor: Any, name: str) -> None:
    """Fill packed integers with random bits."""
    import torch

    limits = torch.iinfo(tensor.dtype)
    tensor.random_(limits.min, limits.max, generator=generator_of(tensor, name))


def generator_of(tensor: Any, name: str) -> Any:
    """Return a generator of the same numbers for a name in every process."""
    import torch

    return torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))


def shards(module: Any, name: str, tensor: Any) -> tuple[int, list[tuple[int, int]]]:
    """Return the dimension in which ranks divide a tensor, and the size of each of its parts, whole
    and on this rank. There are none if every rank has all of it."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    here = tensor.shape
    if "QKVParallelLinear" in kinds:
        heads = (module.total_num_heads, module.num_heads)
        kv_heads = (module.total_num_kv_heads, module.num_kv_heads)
        sizes = ((heads, module.head_size), (kv_heads, module.head_size))
        sizes += ((kv_heads, module.v_head_size),)
        return 0, [(size * whole, size * own) for (whole, own), size in sizes]
    if "MergedColumnParallelLinear" in kinds:
        return 0, list(zip(module.output_sizes, module.output_partition_sizes, strict=True))
    if "ColumnParallelLinear" in kinds:
        return 0, [(module.output_size, here[0])]
    if "RowParallelLinear" in kinds and name == "weight":
        return 1, [(module.input_size, here[1])]
    if "VocabParallelEmbedding" in kinds and name == "weight":
        return 0, [(module.num_embeddings_padded, here[0])]
    if "FusedMoE" in kinds and name == "w13_weight":
        half = here[1] // 2
        return 1, [(half * module.moe_tp_size, half)] * 2
    if "FusedMoE" in kinds and name == "w2_weight":
        return 2, [(here[2] * module.moe_tp_size, here[2])]
    return 0, []


def cut(whole: Any, dim: int, parts: list[tuple[int, int]]) -> Any:
    """Return this rank's pieces of each part. Where there are fewer pieces than ranks, several
    ranks have the same."""
    import torch

    is_alone = not torch.distributed.is_initialized()
    rank, ranks = (
        (0, 1) if is_alone else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    )
    found = []
    for part, (size, own) in zip(whole.split([size for size, _ in parts], dim), parts, strict=True):
        piece = rank * (size // own) // ranks
        found.append(part.narrow(dim, piece * own, own))
    return torch.cat(found, dim)
