"""The engine interface that the algorithm needs. `glue/step/batch_host.py` is SGLang's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from sglang_dflash.types import (
    Commit,
    DraftBlock,
    DraftContext,
    DraftOutput,
    Randomness,
    SamplingPlan,
    TargetOutput,
)


class Host(Protocol):
    def slot_table(self) -> Tensor:
        """Return the map from (request row, position) to KV slot, [rows, width]."""
        ...

    def mark(self) -> None:
        """Mark a stage boundary without synchronising: four marks per step."""
        ...

    def begin_pass(self, lens: Tensor) -> None:
        """Begin another verify pass of the same step: requests have become this long."""
        ...

    def sampling_plan(self) -> SamplingPlan | None:
        """Return the plan for our kernels; None if the batch is greedy or the host samples it."""
        ...

    def plan_verify(self, block: DraftBlock) -> None:
        """Announce the block to verify, before it is drafted: everything but its drafts is known,
        so that the host can plan the verify pass while the drafter runs. Not called if rows are
        shared: then the drafts decide which rows are verified."""
        ...

    def draft_tokens(
        self,
        context: DraftContext,
        masked: DraftBlock,
        randomness: Randomness | None,
        *,
        wanted: int,
        with_confidence: bool = False,
    ) -> DraftOutput:
        """Run the drafter on full blocks whose drafts are still masked; return the first `wanted`
        drafts of each, or more, with the drafter's confidence if asked."""
        ...

    def verify_block(
        self, context: DraftContext, block: DraftBlock, plan: SamplingPlan | None
    ) -> TargetOutput:
        """Run the target on every row of the planned block, writing its KV at the block's slots.
        With a sampling plan, choosing tokens is left to stage 3."""
        ...

    def request_ids(self) -> Sequence[str]:
        """Return the ids of the batch's requests, for simulated acceptance."""
        ...

    def agree(self, *decisions: Tensor) -> None:
        """Overwrite decisions with those of the first rank, where several ranks run one model."""
        ...

    def advance_states(self, commit: Commit) -> None:
        """Advance the target's recurrent states, where it has any, to the committed tokens."""
        ...

    def publish(self, new_lens: Tensor) -> None:
        """Tell the scheduler each request's new length, before the draft KV is written."""
        ...

    def write_draft_kv(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Project target features [n, K * H] into the draft KV at the given slots [n]."""
        ...

    def record(self, commit: Commit) -> None:
        """Update the host's own per-request state with a step's tokens."""
        ...
