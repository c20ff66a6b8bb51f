"""The DFLASH worker in SGLang's scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sglang_dflash
from sglang_dflash import kernels
from sglang_dflash.config import DFlashConfig
from sglang_dflash.costs import GraphCosts, LearntCosts
from sglang_dflash.environment import WIDTH, Environment
from sglang_dflash.glue import changes, compat, release, seams
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping
from sglang_dflash.glue.after_step.request_end import count_steps_in
from sglang_dflash.glue.models.dflash2_model import DFlash2DraftModel
from sglang_dflash.glue.models.draft_model import DFlashDraftModel, tell_heads_of_each_rank
from sglang_dflash.glue.models.embedding import embed_all, input_embedding
from sglang_dflash.glue.models.gemma4_layers import describe_layers, install_fused_layers
from sglang_dflash.glue.models.verify_backend import (
    OURS,
    describe_verify_attention,
    install_verify_attention,
    plan_in_graph,
)
from sglang_dflash.glue.models.weight_updates import TargetUpdates
from sglang_dflash.glue.startup import ranks
from sglang_dflash.glue.startup.server_args import resolve_config
from sglang_dflash.glue.startup.width_args import why_full_blocks, why_one_width
from sglang_dflash.glue.step import disaggregation
from sglang_dflash.glue.step.batch_host import BatchHost, take_features
from sglang_dflash.glue.step.graph_outputs import requests_with_head
from sglang_dflash.glue.step.graph_times import tell_of_launches, time_step
from sglang_dflash.glue.step.runtime import DFlashRuntime
from sglang_dflash.glue.step.spec_input import DFlashState
from sglang_dflash.glue.step.verify_graphs import VerifyGraphRunner, install_verify_graphs
from sglang_dflash.glue.step.warm_up import compile_sharing
from sglang_dflash.glue.step.width_choice import WidthChoice
from sglang_dflash.metrics import AcceptanceAlarm
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.simulate import DrawnAcceptance, SteadyAcceptance
from sglang_dflash.step import decode_step, prefill_step, undrafted_step
from sglang_dflash.types import DraftContext
from sglang_dflash.width import WidthPolicy

logger = logging.getLogger(__name__)

FLASH_BACKENDS = ("fa3", "fa4")

BATCH = changes.Fields(
    "ScheduleBatch",
    {"input_embeds": "SGLang passes embeddings of some requests only, but a prefill needs all"},
)
RESULT = changes.Fields(
    "GenerationBatchResult",
    {
        "new_seq_lens": "a prefill's result carries the state that the next step starts from",
        "next_draft_input": "a prefill's result carries the state that the next step starts from",
    },
)


class DFlashWorker(compat.BaseSpecWorker):
    """Run prefill and decode steps of the target together with its drafter."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any, **placement: Any
    ) -> None:
        """`placement` are the arguments of some releases, which go to the drafter's worker."""
        super().__init__()
        self._target_worker = target_worker
        self.device = target_worker.device
        self.config: DFlashConfig = resolve_config(
            server_args, target_config=target_worker.model_runner.model_config
        )
        device_type = torch.device(self.device).type
        self.ops = kernels.choose(device_type)
        self.simulation = _simulation(self.config)
        alarm = AcceptanceAlarm.from_environment(Environment(), self.config.block_size)
        self.book = Bookkeeping(self.config.block_size, device_type, alarm)
        count_steps_in(self.book)
        model = DFlashDraftModel if self.config.drafter.dflash2 is None else DFlash2DraftModel
        changes.enter(
            compat.ModelRegistry, "models", model.__name__, model, why="drafters load as our model"
        )
        bundle = seams.build_drafter(
            target_worker,
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            algo_label="DFLASH",
            attention_backend_override=self.config.draft_backend,
            **placement,
        )
        self._draft_worker = bundle.draft_worker
        tell_heads_of_each_rank(bundle.draft_model_runner.model_config, self.config.drafter)
        self.runtime = DFlashRuntime(
            self.config,
            self.ops,
            target_worker,
            bundle.draft_model_runner,
            book=self.book,
        )
        self.verify_kernel = "not chosen yet"
        # why every step verifies the same number of rows per request; None if it may change
        self.one_width: str | None = "not chosen yet"
        self.width = self._width_choice(LearntCosts(self.config.block_size))
        self.layers = install_fused_layers(target_worker.model_runner.model, self.ops)
        self.updates = TargetUpdates(target_worker, bundle.draft_model_runner)
        # whether this server only prefills, and others decode
        self.decodes_elsewhere = seams.settings(server_args).disaggregation_mode == "prefill"

    def describe(self) -> dict[str, object]:
        """Return versions, kernels and configuration, for the log and /server_info."""
        return {
            "version": sglang_dflash.__version__,
            "sglang": release.installed(),
            "ops": self.ops.name,
            "verify_attention": self.verify_kernel,
            "layers": self.layers,
            "kernels": self.describe_kernels(),
            "width": {
                **self.width.policy.snapshot(),
                "shares_rows": self.runtime.shares_rows,
                "fixed_because": self.one_width,
            },
            "compared_steps": self.runtime.comparison.steps,
            "alarm_below": self.book.alarm.threshold,
            **self.config.summary(),
        }

    def describe_kernels(self) -> dict[str, str]:
        """Return the implementation of each op, with the reason if it is not ours."""
        return {
            **self.ops.describe(),
            **describe_verify_attention(self.verify_kernel, self.ops),
            **describe_layers(self.layers, self.ops, self.model_runner.model),
            "verify_logits": self.runtime.verify_head.serves,
        }

    @property
    def model_runner(self) -> Any:
        return self._target_worker.model_runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        """Return the attention backends of a step; they decide whether lengths go to the host."""
        return (self.model_runner.attn_backend, self.runtime.draft_runner.attn_backend)

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Share the target's slots: a token's draft KV uses the slot of its target KV, so prefix
        cache hits, chunked prefill and retraction need no bookkeeping of their own."""
        super().alloc_memory_pool(
            memory_pool_config=memory_pool_config,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )
        # row 0 of the slot table is never a request's, so its row count bounds any batch
        self.max_requests = req_to_token_pool.req_to_token.shape[0]
        self.runtime.allocate(self.max_requests)
        self.policy = DraftPolicy(self.max_requests, self.device)
        disaggregation.transfer(
            self.runtime.draft_runner.token_to_kv_pool,
            target_kv_heads=self.model_runner.model_config.get_total_num_kv_heads(),
            shards=self.config.drafter.shards,
        )
        # before SGLang captures the target's graphs, which precede the drafter's
        self.runtime.verify_graphs.install(self.model_runner)

    def init_attention_backends(self) -> None:
        """Choose the kernels, once; SGLang has just built the target's backend."""
        super().init_attention_backends()
        self.verify_kernel = install_verify_attention(
            self.model_runner,
            self.ops,
            max_requests=self.max_requests,
            block_size=self.config.block_size,
            full_blocks=self.config.has_full_blocks,
        )
        self._key_graphs_by_rows()
        if self.config.draft_backend in FLASH_BACKENDS:
            plan_in_graph(self.runtime.draft_runner.attn_backend)
        logger.info("sglang_dflash owns DFLASH: %s", self.describe())

    def _key_graphs_by_rows(self) -> None:
        """Let the target's graphs hold any number of rows per request, if that is asked for and our
        attention runs."""
        server_args = seams.settings(self.model_runner.server_args)
        reason = why_full_blocks(server_args)
        if reason is None and self.ops.verify_attention is not None and self.verify_kernel != OURS:
            reason = f"{self.verify_kernel} verifies full blocks"
        if not self.config.has_full_blocks:
            if reason is not None and self.config.width is not None:
                raise ValueError(
                    f"{WIDTH}={self.config.width} cannot be served: {reason}. Unset it."
                )
            if reason is None and self.ops.verify_attention is not None:
                install_verify_graphs(self.model_runner)
        self.one_width = why_one_width(server_args) or reason

    def init_cuda_graphs(self) -> None:
        drafter = self.config.drafter
        most_with_head = requests_with_head(
            drafter.own_vocab_size or drafter.vocab_size,
            drafter.hidden_size,
            block_size=self.config.block_size,
        )
        self.runtime.draft_graphs.install(
            self.runtime.draft_runner,
            max_requests=self.max_requests,
            max_with_head=self.max_requests if self.one_width else most_with_head,
            with_confidence=self.config.shares_rows and self.one_width is None,
            randomness=self.runtime.buffers.randomness,
        )
        super().init_cuda_graphs()
        self._choose_widths()

    def _choose_widths(self) -> None:
        """Set up the choice of widths, once all graphs are captured."""
        size = self.config.block_size
        costs: GraphCosts | LearntCosts = LearntCosts(size)
        target = self.model_runner.decode_cuda_graph_runner
        draft = self.runtime.draft_runner.decode_cuda_graph_runner
        has_graphs = isinstance(target, VerifyGraphRunner)
        # without graphs, SGLang's Triton backend lays out uniform blocks
        may_share = has_graphs or self.ops.verify_attention is None
        if may_share and self.config.shares_rows and self.one_width is None:
            self.runtime.share_rows()
        if has_graphs:
            self.runtime.use_graphs(target)
            if draft is not None:
                # a fixed width needs them, too: it must not leave the graphs
                costs = time_step(self.runtime, target, draft)
            if self.runtime.shares_rows:
                compile_sharing(
                    self.ops,
                    self.runtime.buffers,
                    max_requests=self.max_requests,
                    block_size=size,
                )
        self.width = self._width_choice(costs)
        self.book.clock.tell(self.width.has_time)
        tell_of_launches(target, self.book.clock)
        tell_of_launches(draft, self.book.clock)

    def _width_choice(self, costs: GraphCosts | LearntCosts) -> WidthChoice:
        fixed = self.config.width
        if fixed is None and self.one_width is not None:
            fixed = self.config.block_size
        policy = WidthPolicy(self.config.block_size, costs, fixed=fixed)
        # a fixed width depends on no clock
        agree = self.runtime.agreement.choice if fixed is None else lambda own: own
        return WidthChoice(policy, self.device, agree=agree)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Learn from a step's result, which SGLang is about to process request by request."""
        self.book.begin_result(self.width.has_result(num_correct_drafts_per_req))

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """Leave the drafter as it is: where SGLang asks, it updates no runner of this worker."""
        return []

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """Leave the drafter as it is; SGLang has just updated the target."""
        return True, self.updates.describe(recv_req)

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """Same as from disk."""
        return True, self.updates.describe(recv_req)

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        """Update the target: for this source SGLang leaves it to the spec worker."""
        return self.updates.update_from_tensor(recv_req)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        assert pp_proxy_tensors is None, "pipeline parallelism is refused"
        ranks.begin_step()
        with torch.inference_mode():
            if batch.forward_mode.is_extend():
                return self._prefill(batch, on_publish)
            return self._decode(batch, BatchHost(self.runtime, batch, on_publish, grammar_barrier))

    def _prefill(self, batch: Any, on_publish: Callable[[Tensor], None] | None) -> Any:
        if batch.input_embeds is not None:
            embeds = embed_all(batch, input_embedding(self.model_runner.model))
            BATCH.write(batch, input_embeds=embeds)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=compat.CaptureHiddenMode.FULL
        )
        RESULT.write(result, new_seq_lens=batch.seq_lens)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        features = take_features(result.logits_output)
        positions = torch.cat(
            [
                torch.arange(start, start + length)
                for start, length in zip(batch.prefix_lens, batch.extend_lens, strict=True)
            ]
        ).to(self.device, non_blocking=True)
        prefill_step(
            BatchHost(self.runtime, batch),
            features=features[: positions.shape[0]],
            positions=positions,
            slots=batch.out_cache_loc,
        )
        if not self.decodes_elsewhere:
            info = batch.sampling_info
            if not info.is_all_greedy:
                self.policy.start(batch.req_pool_indices, info.temperatures.flatten())
            self.runtime.row_sampler.penalties.start(batch.reqs, result.next_token_ids)
            self.width.prefilled()
        state = DFlashState(result.next_token_ids.long(), batch.seq_lens)
        RESULT.write(result, next_draft_input=state)
        return result

    def _start_arrived(self, batch: Any, arrived: list[Any]) -> None:
        """Do for requests that another server has prefilled what `_prefill` does after its pass."""
        which = [i for i, req in enumerate(batch.reqs) if req in arrived]
        if not which:
            # they have ended with their first token, or were retracted at once
            return
        info = batch.sampling_info
        if not info.is_all_greedy:
            at = torch.tensor(which).to(self.device, non_blocking=True)
            self.policy.start(batch.req_pool_indices[at], info.temperatures.flatten()[at])
        self.runtime.row_sampler.penalties.start([batch.reqs[i] for i in which])
        self.width.prefilled()

    def _decode(self, batch: Any, host: BatchHost) -> Any:
        if batch.spec_info.arrived:
            self._start_arrived(batch, batch.spec_info.arrived)
        context = DraftContext(
            anchors=batch.spec_info.bonus_tokens,
            lens=batch.seq_lens,
            request_rows=batch.req_pool_indices,
        )
        choice, share = self.width.start(
            host.request_ids(),
            host.context_bound,
            may_share=host.may_share_rows,
            may_repeat=host.may_repeat,
        )
        self.runtime.comparison.begin(host.request_ids, context, choice, share)
        how: dict[str, Any] = {"buffers": self.runtime.buffers, "config": self.config}
        if choice.passes > 1:
            commit = undrafted_step(host, self.ops, context, passes=choice.passes, **how)
        else:
            commit = decode_step(
                host,
                self.ops,
                context,
                width=choice.width,
                share=share,
                policy=self.policy,
                simulation=self.simulation,
                **how,
            )
        self.runtime.comparison.finish(commit)
        self.width.committed(commit)
        verified = host.target_result
        return compat.GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=commit.token_ids.flatten(),
            accept_lens=commit.lens,
            next_draft_input=DFlashState(commit.bonus, commit.new_lens),
            can_run_cuda_graph=verified.can_run_cuda_graph,
            routed_experts_output=verified.routed_experts_output,
            indexer_topk_output=verified.indexer_topk_output,
            speculative_num_draft_tokens=commit.token_ids.shape[1],
            new_seq_lens=commit.new_lens,
            extra_keep_alive_refs=host.verify_batches,
        )


def _simulation(config: DFlashConfig) -> SteadyAcceptance | DrawnAcceptance | None:
    if config.draws_acceptance:
        return DrawnAcceptance(config.block_size)
    length = config.simulated_accept_length
    return None if length is None else SteadyAcceptance(length)
