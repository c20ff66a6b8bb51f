"""SGLang as a Host: one batch of the scheduler, as the algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue import changes, compat, seams
from sglang_dflash.glue.sampling.plan import is_adjusted, plan_of
from sglang_dflash.glue.step.graph_outputs import VerifyOutputs
from sglang_dflash.glue.step.runtime import DFlashRuntime
from sglang_dflash.glue.step.verify_graphs import VerifyRows
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
from sglang_dflash.width import PASSES

BATCH = changes.Fields(
    "ScheduleBatch",
    {
        "out_cache_loc": "a verify pass writes to the slots of its block",
        "seq_lens": "every verify pass of a step begins where the last one ended",
        "seq_lens_cpu": "the host plans with upper bounds of the lengths, two blocks ahead",
        "seq_lens_sum": "the host plans with upper bounds of the lengths, two blocks ahead",
    },
)
OUTPUT = changes.Fields(
    "LogitsProcessorOutput",
    {
        "hidden_states": "the features are for the drafter, and are dropped once it has read them",
        "next_token_logits": "rows that only pad a graph are dropped",
    },
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
        # at most this many tokens in the batch's prefixes
        self.context_bound = int(self._lens_bound.sum())
        self._is_planned = False
        self.target_result: Any = None
        # of each verify pass, until the device has run them
        self.verify_batches: list[Any] = []
        # outputs of the verify graph; None without a verify pass, or if it ran outside a graph
        self._graph: VerifyOutputs | None = None

    def slot_table(self) -> Tensor:
        return self._runtime.target_runner.req_to_token_pool.req_to_token

    def mark(self) -> None:
        self._runtime.book.clock.mark()

    def sampling_plan(self) -> SamplingPlan | None:
        return self._sampling_plan

    @cached_property
    def _sampling_plan(self) -> SamplingPlan | None:
        return plan_of(self._batch)

    def begin_pass(self, lens: Tensor) -> None:
        BATCH.write(self._batch, seq_lens=lens)
        self._is_planned = False

    @property
    def may_share_rows(self) -> bool:
        """Whether requests may verify different numbers of rows: not if SGLang's sampler runs, or
        the batch has more keys than the graphs hold."""
        runtime = self._runtime
        return runtime.shares_rows and runtime.holds(self.context_bound) and self._chooses_tokens

    @property
    def may_repeat(self) -> bool:
        """Whether the step may have several passes: not if SGLang's sampler runs, the batch has
        more keys than the graphs hold, or all requests are about to end: one more step may be in
        flight."""
        runtime = self._runtime
        if not (runtime.may_repeat and runtime.holds(self.context_bound) and self._chooses_tokens):
            return False
        reqs = self._batch.reqs
        if runtime.sends_by_remainder and any(map(runtime.is_sent_in_parts, reqs)):
            return False
        return any(
            req.sampling_params.max_new_tokens - len(req.output_ids) >= 2 * PASSES for req in reqs
        )

    @cached_property
    def _chooses_tokens(self) -> bool:
        """Whether the tokens of this batch are chosen without SGLang's sampler."""
        return self._is_greedy or self._sampling_plan is not None

    @cached_property
    def _is_greedy(self) -> bool:
        """Whether every request takes the argmax of the logits as they are."""
        return self._batch.sampling_info.is_all_greedy and not is_adjusted(self._batch)

    def request_ids(self) -> list[str]:
        return [req.rid for req in self._batch.reqs]

    def draft_tokens(
        self,
        context: DraftContext,
        masked: DraftBlock,
        randomness: Randomness | None,
        *,
        wanted: int,
        with_confidence: bool = False,
    ) -> DraftOutput:
        runtime = self._runtime
        head, graphs = runtime.block_head, runtime.draft_graphs
        noise = None if randomness is None else Noise(randomness.keys, randomness.scales)
        turns = graphs.turns(context.anchors.shape[0])
        if len(turns) == 1:
            result = self._run_drafter(turns[0], context, masked)
            found = graphs.drafts_of(result, turns[0].stop, noise)
            if found is None:
                hidden = result.logits_output.hidden_states
                found = head.draft_blocks(
                    hidden,
                    noise,
                    wanted=wanted,
                    with_confidence=with_confidence,
                    anchors=context.anchors,
                )
        else:
            results = (self._run_drafter(turn, context, masked) for turn in turns)
            # copied turn by turn: the next one overwrites the graph's output
            rows = [head.masked_rows(r.logits_output.hidden_states, wanted) for r in results]
            found = head.draft(
                torch.cat(rows),
                noise,
                wanted=wanted,
                with_confidence=with_confidence,
                anchors=context.anchors,
            )
        drafts, logits, confidence = found
        return DraftOutput(
            argmax_drafts=drafts[0],
            sampled_drafts=drafts[-1],
            logits=logits,
            confidence=confidence,
        )

    def _run_drafter(self, turn: slice, context: DraftContext, masked: DraftBlock) -> Any:
        """Run the drafter on some of the requests."""
        lens_bound = self._lens_bound[turn]
        forward_batch = compat.ForwardBatch(
            forward_mode=compat.ForwardMode.TARGET_VERIFY,
            batch_size=turn.stop - turn.start,
            input_ids=masked.token_ids[turn].flatten(),
            req_pool_indices=context.request_rows[turn],
            seq_lens=context.lens[turn],
            out_cache_loc=masked.slots[turn].flatten(),
            seq_lens_sum=int(lens_bound.sum()),
            seq_lens_cpu=lens_bound,
            positions=masked.positions[turn].flatten(),
            spec_algorithm=compat.SpeculativeAlgorithm.DFLASH,
            spec_info=self._runtime.block_input,
            capture_hidden_mode=compat.CaptureHiddenMode.NULL,
        )
        draft_runner = self._runtime.draft_runner
        seams.plan_slots(forward_batch, draft_runner)
        return draft_runner.forward(forward_batch)

    def plan_verify(self, block: DraftBlock) -> None:
        runtime = self._runtime
        if runtime.plan_stream is None or not self._can_plan_early(block):
            return
        self._is_planned = True
        runtime.plan_stream.wait_stream(runtime.device_module.current_stream())
        with runtime.device_module.stream(runtime.plan_stream):
            self._plan_verify(block)

    def _can_plan_early(self, block: DraftBlock) -> bool:
        """Return whether the draft pass leaves the plan as it is: both models' graphs share their
        inputs, so it must have the same ones, or not run."""
        if self.verify_batches:
            # a further pass of the step: nothing runs that a plan could be made beside
            return False
        requests, width = block.token_ids.shape
        is_drafted_at_once = len(self._runtime.draft_graphs.turns(requests)) == 1
        return width == 1 or (width == self._runtime.config.block_size and is_drafted_at_once)

    def _plan_verify(self, block: DraftBlock) -> None:
        """Plan the verify pass; its tokens are read from the block when it runs."""
        runtime, batch = self._runtime, self._batch
        requests, width = block.token_ids.shape
        graph = runtime.graph_for(block.num_rows, self.context_bound)
        rows, layout = block.rows, None
        if block.shared is not None:
            assert graph in (None, block.num_rows), f"{block.num_rows} rows fill no graph"
            layout = VerifyRows(block.num_rows, requests, width, block.shared.bounds)
        elif graph is not None:
            rows = runtime.buffers.verified.rows(block.num_rows, graph)
            layout = VerifyRows(graph, requests, width)
        verify_input = compat.DFlashVerifyInput(
            draft_token=rows.token_ids,
            positions=rows.positions,
            draft_token_num=width,
            capture_hidden_mode=compat.CaptureHiddenMode.FULL,
            ragged_verify_layout=layout,
        )
        BATCH.write(
            batch,
            out_cache_loc=rows.slots,
            seq_lens_cpu=self._lens_bound,
            seq_lens_sum=self.context_bound,
        )
        verify_batch, in_any_graph = verify_input.prepare_for_verify(batch, runtime.target_worker)
        self.verify_batches.append(verify_batch)
        assert graph is None or in_any_graph, f"the graph of {layout} did not run"

    def verify_block(
        self, context: DraftContext, block: DraftBlock, plan: SamplingPlan | None
    ) -> TargetOutput:
        runtime = self._runtime
        if not self._is_planned:
            self._plan_verify(block)
        elif runtime.plan_stream is not None:
            runtime.device_module.current_stream().wait_stream(runtime.plan_stream)
        self.target_result = runtime.target_worker.forward_batch_generation(
            batch=None,
            forward_batch=self.verify_batches[-1],
            is_verify=True,
            skip_attn_backend_init=True,
        )
        self._graph = runtime.verify_graphs.outputs_of(self.target_result)
        output = self.target_result.logits_output
        features = self._used_rows(block, output)
        choices = self._choices(context, block, output) if plan is None else None
        return TargetOutput(
            features=features,
            choices=choices,
            logits=output.next_token_logits if choices is None else None,
            logit_cap=runtime.verify_head.cap,
        )

    def _choices(self, context: DraftContext, block: DraftBlock, output: Any) -> Tensor | None:
        """Return the target's token after each row; None if the argmax is still to be taken."""
        if not self._is_greedy:
            sampler = self._runtime.row_sampler
            return sampler.choose(
                self._batch, output, context, block, grammar_barrier=self._grammar_barrier
            )
        if self._graph is None:
            return None
        choices = self._graph.choices[: block.num_rows]
        return choices if block.shared is not None else choices.view(block.token_ids.shape)

    @staticmethod
    def _used_rows(block: DraftBlock, output: Any) -> Tensor:
        """Return the features of the block's rows, and drop the padding's logits."""
        rows = block.num_rows
        features = take_features(output)
        if output.next_token_logits is not None and output.next_token_logits.shape[0] > rows:
            OUTPUT.write(output, next_token_logits=output.next_token_logits[:rows])
        return features[:rows]

    def agree(self, *decisions: Tensor) -> None:
        self._runtime.agreement.overwrite(*decisions)

    def advance_states(self, commit: Commit) -> None:
        if self._runtime.states is not None:
            self._runtime.states.advance(self._batch, commit)

    def publish(self, new_lens: Tensor) -> None:
        if self._on_publish is not None:
            self._on_publish(new_lens)

    def write_draft_kv(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        projected = None if self._graph is None else self._graph.projected
        self._runtime.draft_cache.write(features, positions, slots, projected=projected)

    def record(self, commit: Commit) -> None:
        self._runtime.row_sampler.penalties.commit(self._batch.reqs, commit.token_ids, commit.lens)
        self._runtime.book.batch_step()
