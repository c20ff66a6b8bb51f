"""SGLang as a Host: one batch of the scheduler, as the algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.sampling.plan import plan_of
from sglang_dflash.glue.step.graph_outputs import VerifyOutputs
from sglang_dflash.glue.step.runtime import DFlashRuntime
from sglang_dflash.kernels import Noise
from sglang_dflash.types import (
    Commit,
    DraftBlock,
    DraftContext,
    DraftOutput,
    Randomness,
    SamplingPlan,
    TargetOutput,
)

BATCH = changes.Fields(
    "ScheduleBatch",
    {
        "out_cache_loc": "a verify pass writes to the slots of its block",
        "seq_lens_cpu": "the host plans with upper bounds of the lengths, two blocks ahead",
        "seq_lens_sum": "the host plans with upper bounds of the lengths, two blocks ahead",
    },
)
OUTPUT = changes.Fields(
    "LogitsProcessorOutput",
    {"hidden_states": "the features are for the drafter, and are dropped once it has read them"},
)


def take_features(output: Any) -> Tensor:
    """Return the features captured for the drafter, and remove them from the output."""
    features = output.hidden_states
    OUTPUT.write(output, hidden_states=None)
    return features


class BatchHost:
    """One batch, as the algorithm sees it. Lives for one step."""

    def __init__(
        self,
        runtime: DFlashRuntime,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> None:
        self._runtime = runtime
        self._batch = batch
        self._on_publish = on_publish
        self._grammar_barrier = grammar_barrier
        # host-side upper bound of each length during this step, for backends that plan on the host
        if batch.seq_lens_cpu is None:
            self._lens_bound = batch.spec_info.reserved_lens
        else:
            self._lens_bound = batch.seq_lens_cpu + runtime.config.block_size
        self.target_result: Any = None
        self.verify_batch: Any = None
        # outputs of the verify graph; None without a verify pass, or if it ran outside a graph
        self._graph: VerifyOutputs | None = None

    def slot_table(self) -> Tensor:
        return self._runtime.target_runner.req_to_token_pool.req_to_token

    def mark(self) -> None:
        self._runtime.book.clock.mark()

    def sampling_plan(self) -> SamplingPlan | None:
        return plan_of(self._batch)

    def draft_tokens(
        self, context: DraftContext, masked: DraftBlock, randomness: Randomness | None
    ) -> DraftOutput:
        runtime = self._runtime
        if runtime.plan_stream is not None:
            # everything about the verify pass except its tokens is known
            runtime.plan_stream.wait_stream(runtime.device_module.current_stream())
            with runtime.device_module.stream(runtime.plan_stream):
                self._plan_verify(masked)
        forward_batch = compat.ForwardBatch(
            forward_mode=compat.ForwardMode.TARGET_VERIFY,
            batch_size=context.anchors.shape[0],
            input_ids=masked.token_ids.flatten(),
            req_pool_indices=context.request_rows,
            seq_lens=context.lens,
            out_cache_loc=masked.slots.flatten(),
            seq_lens_sum=int(self._lens_bound.sum()),
            seq_lens_cpu=self._lens_bound,
            positions=masked.positions.flatten(),
            spec_algorithm=compat.SpeculativeAlgorithm.DFLASH,
            spec_info=runtime.block_input,
            capture_hidden_mode=compat.CaptureHiddenMode.NULL,
        )
        result = runtime.draft_runner.forward(forward_batch)
        found = runtime.draft_graphs.drafts_of(result, forward_batch.batch_size)
        if found is None:
            noise = None if randomness is None else Noise(randomness.keys, randomness.scales)
            found = runtime.block_head.draft(result.logits_output.hidden_states, noise)
        drafts, logits = found
        return DraftOutput(argmax_drafts=drafts[0], sampled_drafts=drafts[-1], logits=logits)

    def _plan_verify(self, block: DraftBlock) -> None:
        """Plan the verify pass; its tokens are read from the block when it runs."""
        runtime, batch = self._runtime, self._batch
        verify_input = compat.DFlashVerifyInput(
            draft_token=block.token_ids.flatten(),
            positions=block.positions.flatten(),
            draft_token_num=runtime.config.block_size,
            capture_hidden_mode=compat.CaptureHiddenMode.FULL,
        )
        BATCH.write(
            batch,
            out_cache_loc=block.slots.flatten(),
            seq_lens_cpu=self._lens_bound,
            seq_lens_sum=int(self._lens_bound.sum()),
        )
        self.verify_batch, _ = verify_input.prepare_for_verify(batch, runtime.target_worker)

    def verify_block(
        self, context: DraftContext, block: DraftBlock, plan: SamplingPlan | None
    ) -> TargetOutput:
        runtime, batch = self._runtime, self._batch
        if runtime.plan_stream is None:
            self._plan_verify(block)
        else:
            runtime.device_module.current_stream().wait_stream(runtime.plan_stream)
        self.target_result = runtime.target_worker.forward_batch_generation(
            batch=None,
            forward_batch=self.verify_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )
        self._graph = graph = runtime.verify_graphs.outputs_of(self.target_result)
        output = self.target_result.logits_output
        features = take_features(output)
        choices = None
        if plan is None:
            choices = runtime.row_sampler.choose(
                batch,
                output,
                context,
                block,
                greedy=None if graph is None else graph.choices,
                grammar_barrier=self._grammar_barrier,
            )
        return TargetOutput(
            features=features,
            choices=choices,
            logits=output.next_token_logits if choices is None else None,
            logit_cap=runtime.verify_head.cap,
        )

    def publish(self, new_lens: Tensor) -> None:
        if self._on_publish is not None:
            self._on_publish(new_lens)

    def write_draft_kv(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        projected = None if self._graph is None else self._graph.projected
        self._runtime.draft_cache.write(features, positions, slots, projected=projected)

    def record(self, commit: Commit) -> None:
        self._runtime.row_sampler.penalties.commit(self._batch.reqs, commit.token_ids, commit.lens)
        self._runtime.book.batch_step()
