"""The ops of a step, chosen once at start-up. Tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglang_dflash.kernels.accept import reference as accept
from sglang_dflash.kernels.accept.reference import COUNT_MATCHES
from sglang_dflash.kernels.block import reference as block
from sglang_dflash.kernels.context import reference as context
from sglang_dflash.kernels.gemma_layer import reference as gemma_layer
from sglang_dflash.kernels.logits.reference import Noise
from sglang_dflash.kernels.sampling import reference as sampling
from sglang_dflash.kernels.sampling.reference import MAX_TOP_K

__all__ = ["COUNT_MATCHES", "MAX_TOP_K", "TORCH", "Noise", "Ops", "choose", "triton_ops"]


class BuildBlock(Protocol):
    def __call__(
        self,
        anchors: Tensor,
        lens: Tensor,
        rows: Tensor,
        slot_table: Tensor,
        *,
        mask_token_id: int,
        last_position: int,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> None: ...


class AcceptBlock(Protocol):
    def __call__(
        self,
        token_ids: Tensor,
        choices: Tensor,
        lens: Tensor,
        slots: Tensor,
        num_correct: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...


class ContextHidden(Protocol):
    def __call__(
        self, features: Tensor, *, fc_weight: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor: ...


class WriteContext(Protocol):
    def __call__(
        self,
        projected: Tensor,
        positions: Tensor,
        slots: Tensor,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        *,
        k_norm_weights: Sequence[Tensor],
        cos_sin: Tensor,
        eps: float,
    ) -> None: ...


class ArgmaxRows(Protocol):
    def __call__(
        self, logits: Tensor, logit_cap: float = 0.0, noise: Noise | None = None
    ) -> Tensor: ...


class ArgmaxAndSample(Protocol):
    def __call__(self, logits: Tensor, logit_cap: float, noise: Noise) -> Tensor: ...


class SampleRows(Protocol):
    def __call__(
        self,
        logits: Tensor,
        noise: Noise,
        *,
        temperatures: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        logit_cap: float = 0.0,
    ) -> Tensor: ...


class RejectByBlock(Protocol):
    def __call__(
        self,
        logits: Tensor,
        draft_logits: Tensor,
        drafts: Tensor,
        argmax_drafts: Tensor,
        noise: Noise,
        uniforms: Tensor,
        *,
        is_sampled: Tensor,
        logit_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class NormAddNorm(Protocol):
    def __call__(
        self,
        parts: Tensor,
        residual: Tensor,
        *,
        norm_weight: Tensor,
        next_weights: Sequence[Tensor],
        scale: Tensor | None,
        eps: float,
        beside: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class NormAndTurn(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        positions: Tensor,
        *,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin: Tensor,
        q_heads: int,
        kv_heads: int,
        eps: float,
    ) -> None: ...


class ThinLinear(Protocol):
    # None where the library's product is the better one
    def __call__(self, x: Tensor, weight: Tensor) -> Tensor | None: ...


@dataclass(frozen=True)
class Ops:
    """One implementation of every op; `name` is what the log calls it."""

    name: str
    build_block: BuildBlock
    accept_block: AcceptBlock
    context_hidden: ContextHidden
    write_context: WriteContext
    argmax_rows: ArgmaxRows
    argmax_and_sample: ArgmaxAndSample
    sample_rows: SampleRows
    reject_by_block: RejectByBlock
    norm_and_turn: NormAndTurn
    norm_add_norm: NormAddNorm
    thin_linear: ThinLinear


TORCH = Ops(
    name="torch",
    build_block=block.build_block,
    accept_block=accept.accept_block,
    context_hidden=context.context_hidden,
    write_context=context.write_context,
    argmax_rows=sampling.argmax_rows,
    argmax_and_sample=sampling.argmax_and_sample,
    sample_rows=sampling.sample_rows,
    reject_by_block=sampling.reject_by_block,
    norm_and_turn=gemma_layer.norm_and_turn,
    norm_add_norm=gemma_layer.norm_add_norm,
    thin_linear=gemma_layer.thin_linear,
)


def choose(device_type: str) -> Ops:
    """Return the ops for a device. The caller logs the name."""
    if device_type == "cpu":
        return TORCH
    if device_type != "cuda":
        raise ValueError(f"sglang_dflash has no ops for device {device_type!r}; it has cpu, cuda.")
    return triton_ops()


def triton_ops() -> Ops:
    """Return the Triton kernels, each in the place of its twin."""
    from sglang_dflash.kernels.accept.triton import accept_block
    from sglang_dflash.kernels.block.triton import build_block
    from sglang_dflash.kernels.context.triton import context_hidden, write_context
    from sglang_dflash.kernels.gemma_layer.qkv_norm import norm_and_turn
    from sglang_dflash.kernels.gemma_layer.residual_norm import norm_add_norm
    from sglang_dflash.kernels.gemma_layer.thin_linear import thin_linear
    from sglang_dflash.kernels.sampling.argmax import argmax_and_sample, argmax_rows
    from sglang_dflash.kernels.sampling.rejection import reject_by_block
    from sglang_dflash.kernels.sampling.top_k import sample_rows

    return Ops(
        name="triton",
        build_block=build_block,
        accept_block=accept_block,
        context_hidden=context_hidden,
        write_context=write_context,
        argmax_rows=argmax_rows,
        argmax_and_sample=argmax_and_sample,
        sample_rows=sample_rows,
        reject_by_block=reject_by_block,
        norm_and_turn=norm_and_turn,
        norm_add_norm=norm_add_norm,
        thin_linear=thin_linear,
    )
