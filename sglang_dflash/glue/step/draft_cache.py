"""The drafter's KV of committed tokens: target features, projected layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.kernels import Ops


class DraftCache:
    """Projects target features and writes them into the draft KV pool."""

    def __init__(self, draft_runner: Any, ops: Ops) -> None:
        self._runner = draft_runner
        self._ops = ops

    def kv_projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of each layer's KV projection, keys before values."""
        attentions = [layer.self_attn for layer in self._runner.model.layers]
        return [(attention.kv_weight, attention.kv_bias) for attention in attentions]

    def context_hidden(self, features: Tensor) -> Tensor:
        """Return the input of every layer's KV projection, [n, H], from features [n, F]."""
        model = self._runner.model
        return self._ops.context_hidden(
            features,
            fc_weight=model.fc.weight,
            norm_weight=model.hidden_norm.weight,
            eps=model.config.rms_norm_eps,
        )

    def write(
        self,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        *,
        projected: Tensor | None = None,
    ) -> None:
        """Project target features into the draft KV of every layer, at the given slots.

        `projected` begins with each row's projection, if the CUDA graph has computed it; the
        features are not read then.
        """
        layers = list(self._runner.model.layers)
        if projected is not None:
            self._write_layers(layers, projected[:, : positions.shape[0]], positions, slots)
            return
        hidden = self.context_hidden(features)
        for layer in layers:
            # one layer at a time: a prompt has many rows
            own = layer.self_attn
            of_layer = torch.nn.functional.linear(hidden, own.kv_weight, own.kv_bias)[None]
            self._write_layers([layer], of_layer, positions, slots)

    def _write_layers(
        self, layers: list[Any], projected: Tensor, positions: Tensor, slots: Tensor
    ) -> None:
        pool = self._runner.token_to_kv_pool
        attentions = [layer.self_attn for layer in layers]
        ids = [attention.attn.layer_id for attention in attentions]
        self._ops.write_context(
            projected,
            positions,
            slots,
            [pool.get_key_buffer(layer_id) for layer_id in ids],
            [pool.get_value_buffer(layer_id) for layer_id in ids],
            k_norm_weights=[attention.k_norm.weight for attention in attentions],
            cos_sin=attentions[0].rotary_emb.cos_sin_cache,
            eps=self._runner.model.config.rms_norm_eps,
        )
