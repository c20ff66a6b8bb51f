"""The recurrent states of linear-attention layers, advanced to what a step has committed.

A verify pass reads each request's states, convolution inputs included, and writes those after each
row of its block to a buffer of SGLang's. SGLang also copies the states to the request's, and, when
a multiple of some number of tokens is passed, to a snapshot for the prefix cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.glue import seams
from sglang_dflash.glue.startup.recurrent_targets import recurrent_config
from sglang_dflash.types import Commit


class RecurrentStates:
    """The states of a target's linear-attention layers."""

    def __init__(self, target_runner: Any) -> None:
        self._runner = target_runner

    @classmethod
    def of(cls, target_runner: Any) -> RecurrentStates | None:
        """Return the states of a target; None if it has no such layers."""
        config = recurrent_config(target_runner.model_config.hf_config)
        return None if config is None else cls(target_runner)

    def advance(self, batch: Any, commit: Commit) -> None:
        """Make the states after the last committed rows of the batch's verify pass the requests'
        own. Reads nothing back from the device."""
        last = commit.lens.long() - 1
        self._runner.attn_backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=last,
            mamba_track_indices=batch.mamba_track_indices,
            mamba_steps_to_track=self._snapshot_rows(batch, commit, last),
            model=self._runner.model,
            req_pool_indices=batch.req_pool_indices,
        )

    @staticmethod
    def _snapshot_rows(batch: Any, commit: Commit, last: Tensor) -> Tensor | None:
        """Return the row with which each request has reached the last multiple of the interval of
        snapshots; negative, which means none to SGLang, if it was reached in an earlier step."""
        if batch.mamba_track_indices is None:
            return None
        return last - commit.new_lens % seams.tokens_between_snapshots(batch)
