"""The ops of a step, chosen once at start-up. Tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglang_dflash.kernels import reference


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


class AcceptWalk(Protocol):
    def __call__(self, token_ids: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]: ...


class CommitTokens(Protocol):
    def __call__(
        self, token_ids: Tensor, num_correct: Tensor, bonus: Tensor, lens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class CommittedSlots(Protocol):
    def __call__(self, slots: Tensor, commit_lens: Tensor) -> Tensor: ...


class ContextKV(Protocol):
    def __call__(
        self,
        features: Tensor,
        positions: Tensor,
        *,
        fc_weight: Tensor,
        norm_weight: Tensor,
        kv_weights: Sequence[Tensor],
        k_norm_weights: Sequence[Tensor],
        cos_sin: Tensor,
        eps: float,
    ) -> list[tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Ops:
    """One implementation of every op; `name` is what the log calls it."""

    name: str
    build_block: BuildBlock
    accept_walk: AcceptWalk
    commit_tokens: CommitTokens
    committed_slots: CommittedSlots
    context_kv: ContextKV


TORCH = Ops(
    name="torch",
    build_block=reference.build_block,
    accept_walk=reference.accept_walk,
    commit_tokens=reference.commit_tokens,
    committed_slots=reference.committed_slots,
    context_kv=reference.context_kv,
)


def choose(device_type: str) -> Ops:
    """Return the ops for a device. The caller logs the name."""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"sglang_dflash has no ops for device {device_type!r}; it has cpu, cuda.")
    return TORCH
