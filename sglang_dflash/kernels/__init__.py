"""The ops of a step, chosen once at start-up. Tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglang_dflash.kernels import draws, reference
from sglang_dflash.kernels.draws import Noise
from sglang_dflash.kernels.reference import COUNT_MATCHES

__all__ = ["COUNT_MATCHES", "MAX_TOP_K", "TORCH", "Noise", "Ops", "choose", "triton_ops"]

# the most that `sample_rows` takes
MAX_TOP_K = 128


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
    build_block=reference.build_block,
    accept_block=reference.accept_block,
    context_hidden=reference.context_hidden,
    write_context=reference.write_context,
    argmax_rows=draws.argmax_rows,
    argmax_and_sample=draws.argmax_and_sample,
    sample_rows=draws.sample_rows,
    reject_by_block=draws.reject_by_block,
    norm_and_turn=reference.norm_and_turn,
    norm_add_norm=reference.norm_add_norm,
    thin_linear=reference.thin_linear,
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
    from sglang_dflash.kernels import (
        accept,
        argmax,
        block,
        context,
        qkv_norm,
        rejection,
        residual_norm,
        sample,
        thin_linear,
    )

    return Ops(
        name="triton",
        build_block=block.build_block,
        accept_block=accept.accept_block,
        context_hidden=context.context_hidden,
        write_context=context.write_context,
        argmax_rows=argmax.argmax_rows,
        argmax_and_sample=argmax.argmax_and_sample,
        sample_rows=sample.sample_rows,
        reject_by_block=rejection.reject_by_block,
        norm_and_turn=qkv_norm.norm_and_turn,
        norm_add_norm=residual_norm.norm_add_norm,
        thin_linear=thin_linear.thin_linear,
    )
