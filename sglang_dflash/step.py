"""DFlash on one page: what happens to a batch in prefill and in a decode step."""

from __future__ import annotations

from torch import Tensor

from sglang_dflash.accept import Simulation, accept, decide
from sglang_dflash.buffers import StepBuffers
from sglang_dflash.commit import commit_step
from sglang_dflash.config import DFlashConfig
from sglang_dflash.draft import draft
from sglang_dflash.host import Host
from sglang_dflash.kernels import Ops
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.types import Commit, DraftContext
from sglang_dflash.verify import verify


def prefill_step(host: Host, *, features: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Write the draft KV of the prompt tokens that the target has just prefilled."""
    host.write_draft_kv(features, positions, slots)


def decode_step(
    host: Host,
    ops: Ops,
    context: DraftContext,
    *,
    buffers: StepBuffers,
    policy: DraftPolicy,
    config: DFlashConfig,
    simulation: Simulation | None,
) -> Commit:
    """Draft a block, verify it, and commit the prefix the target itself would have generated."""
    host.mark()
    plan = host.sampling_plan()
    proposal = draft(host, ops, context, plan, buffers=buffers, policy=policy, config=config)
    host.mark()
    target = verify(host, context, proposal.block, plan)
    host.mark()
    verdict = decide(ops, plan, proposal, target)
    commit = accept(ops, context, proposal.block, verdict, simulation=simulation)
    # publish before the draft KV write: planning the next step reads lengths, not this cache
    host.publish(commit.new_lens)
    commit_step(host, policy, context, proposal, target, verdict, commit)
    host.mark()
    return commit
