"""SGLang as a Host: the target worker, the draft runner, and one batch of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.buffers import StepRandomness
from sglang_dflash.config import DFlashConfig
from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.after_step.exporter import Bookkeeping
from sglang_dflash.glue.models.heads import DraftHead, VerifyHead
from sglang_dflash.glue.sampling.penalties import PenaltyTable
from sglang_dflash.glue.sampling.row_sampler import RowSampler, plan_of
from sglang_dflash.kernels import Noise, Ops
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
        "out_cache_loc": "a verify pass writes its block's slots",
        "seq_lens_cpu": "the host knows bounds of a step's lengths, two blocks ahead",
        "seq_lens_sum": "the host knows bounds of a step's lengths, two blocks ahead",
    },
)
OUTPUT = changes.Fields(
    "LogitsProcessorOutput",
    {"hidden_states": "features are the drafter's, and are dropped when it has read them"},
)


class Engine:
    """What lives as long as the server: both models, and how a block runs through them."""

    def __init__(
        self,
        config: DFlashConfig,
        ops: Ops,
        target_worker: Any,
        draft_runner: Any,
        *,
        book: Bookkeeping,
    ) -> None:
        self.config = config
        self.book = book
        self.ops = ops
        self.target_worker = target_worker
        self.target_runner = target_worker.model_runner
        self.draft_runner = draft_runner
        target_model = self.target_runner.model
        draft_runner.model.share_embedding(target_model.get_input_embeddings())
        self.head = DraftHead(target_model, config.drafter.vocab_size, ops)
        device_type = torch.device(draft_runner.device).type
        # torch.cuda; on a CPU torch's stand-in, where everything happens in order
        self.device_module = torch.get_device_module(device_type)
        self.plan_stream = self.device_module.Stream() if config.overlap.plan_stream else None
        self.verify_head = VerifyHead(target_model, ops, device_type=device_type)
        self.row_sampler = RowSampler(
            self.target_runner.sampler,
            self.verify_head,
            PenaltyTable(self.target_runner.model_config.vocab_size, draft_runner.device),
        )
        self.randomness: StepRandomness  # as soon as the number of requests is known
        self.graph_projected: Tensor | None = None
        self.graph_choices: Tensor | None = None
        self.graph_logits: Tensor | None = None
        self.block_input = compat.DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=config.block_size,
            capture_hidden_mode=compat.CaptureHiddenMode.NULL,
        )

    def finish_in_graph(self) -> None:
        """Have captured verify graphs end in the greedy choice after every row, `graph_choices`,
        and the projection of every row, `graph_projected`. Which rows are kept, and whether the
        choice is asked for, is known later; but a graph's launches cost the host nothing."""
        layers = self.draft_runner.model.layers

        def finish(runner: Any, output: Any, _forward_batch: Any, num_tokens: int) -> None:
            weights = [layer.self_attn.kv_weight for layer in layers]
            if self.graph_projected is None:
                rows = max(runner.capture_bs) * self.config.block_size
                width = weights[0].shape[0]
                self.graph_projected = weights[0].new_empty(len(weights), rows, width)
                self.graph_choices = weights[0].new_empty(rows, dtype=torch.int64)
            assert self.graph_choices is not None
            self.graph_choices[:num_tokens] = self.verify_head.greedy(output.next_token_logits)
            hidden = self._context_hidden(output.hidden_states)
            for weight, out in zip(weights, self.graph_projected[:, :num_tokens], strict=True):
                torch.matmul(hidden, weight.T, out=out)

        _end_graphs_with(
            finish, self.target_runner, why="verify graphs end in choices and draft KV projections"
        )

    def draft_head_in_graph(self, max_requests: int) -> None:
        """Have captured draft graphs end in the head and its choices, written to `graph_drafts`,
        from `graph_logits`."""
        width = self.config.block_size - 1
        device = self.draft_runner.device
        self.graph_drafts = torch.zeros(2, max_requests, width, dtype=torch.int64, device=device)

        def head(runner: Any, output: Any, _forward_batch: Any, _num_tokens: int) -> None:
            hidden = output.hidden_states
            size = hidden.shape[0] // self.config.block_size
            if self.graph_logits is None:
                # one buffer for all graphs, of the size that the largest needs
                self.graph_logits = self.head.allocate_logits(max(runner.capture_bs) * width)
            out = self.graph_logits[: size * width]
            noise = self.randomness.for_batch(size)
            self.graph_drafts[:, :size], _ = self.draft_head(hidden, noise, out)

        _end_graphs_with(head, self.draft_runner, why="draft graphs end in the head's choices")

    def drafts_of_graph(self, size: int) -> tuple[Tensor, Tensor | None]:
        """Return what `draft_head` would for so many requests, from a graph that ran."""
        assert self.graph_logits is not None
        width = self.config.block_size - 1
        logits = self.head.without_vocab_padding(self.graph_logits[: size * width])
        return self.graph_drafts[:, :size], self._by_block(logits, size)

    def draft_head(
        self, hidden: Tensor, noise: Noise | None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the argmax drafts of blocks of hidden states and, with noise, sampled ones,
        [1 or 2, b, B - 1]; and the logits, in `out` if given, [b, B - 1, V], None on a rank that
        sees a part of the vocabulary."""
        cap = self.verify_head.cap
        size = hidden.shape[0] // self.config.block_size
        if out is not None or hidden.device.type != "cpu":
            hidden = hidden.unflatten(0, (size, -1))[:, 1:].flatten(0, 1)
        elif noise is not None:
            # whole blocks multiply faster there, though the first row is not needed
            noise = Noise(noise.keys.roll(1, dims=1), noise.scales)
        logits = self.head.multiply(hidden, out)
        drafts = self.head.choose(logits, logit_cap=cap, noise=noise).unflatten(1, (size, -1))
        return drafts[:, :, 1 - self.config.block_size :], self._by_block(logits, size)

    def _by_block(self, logits: Tensor, size: int) -> Tensor | None:
        if not self.head.sees_all:
            return None
        return logits.unflatten(0, (size, -1))[:, 1 - self.config.block_size :]

    def _context_hidden(self, features: Tensor) -> Tensor:
        model = self.draft_runner.model
        return self.ops.context_hidden(
            features,
            fc_weight=model.fc.weight,
            norm_weight=model.hidden_norm.weight,
            eps=model.config.rms_norm_eps,
        )

    def write_draft_kv(
        self, features: Tensor, positions: Tensor, slots: Tensor, *, in_graph: bool
    ) -> None:
        """Project target features into the draft KV of every layer, at the given slots.

        After a verify pass in a graph they are projected already.
        """
        layers = list(self.draft_runner.model.layers)
        if in_graph and self.graph_projected is not None:
            projected = self.graph_projected[:, : positions.shape[0]]
            self._write_layers(layers, projected, positions, slots)
            return
        hidden = self._context_hidden(features)
        for layer in layers:
            # one at a time: a prompt has many rows
            projected = (hidden @ layer.self_attn.kv_weight.T)[None]
            self._write_layers([layer], projected, positions, slots)

    def _write_layers(
        self, layers: list[Any], projected: Tensor, positions: Tensor, slots: Tensor
    ) -> None:
        pool = self.draft_runner.token_to_kv_pool
        attentions = [layer.self_attn for layer in layers]
        ids = [attention.attn.layer_id for attention in attentions]
        self.ops.write_context(
            projected,
            positions,
            slots,
            [pool.get_key_buffer(layer_id) for layer_id in ids],
            [pool.get_value_buffer(layer_id) for layer_id in ids],
            k_norm_weights=[attention.k_norm.weight for attention in attentions],
            cos_sin=attentions[0].rotary_emb.cos_sin_cache,
            eps=self.draft_runner.model.config.rms_norm_eps,
        )


def _end_graphs_with(tail: Callable[..., None], runner: Any, *, why: str) -> None:
    """Have a runner's captured graphs end in `tail`.

    SGLang captures outside of its models' own `no_grad`, and some weights that a tail reads require
    gradients: a tied embedding, for one, is a plain nn.Embedding.
    """
    changes.append_to(runner, "capture_tail_hooks", torch.no_grad()(tail), why=why)


def take_features(output: Any) -> Tensor:
    """Return what the target captured for the drafter, which the output then no longer holds."""
    features = output.hidden_states
    OUTPUT.write(output, hidden_states=None)
    return features


class BatchHost:
    """One decode batch, seen by the algorithm. Lives for one step."""

    def __init__(
        self,
        engine: Engine,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._batch = batch
        self._on_publish = on_publish
        self._grammar_barrier = grammar_barrier
        # host-side bound of each length during this step, for backends that plan on the host
        if batch.seq_lens_cpu is None:
            self._lens_bound = batch.spec_info.reserved_lens
        else:
            self._lens_bound = batch.seq_lens_cpu + engine.config.block_size
        self.target_result: Any = None
        self.verify_batch: Any = None

    def slot_table(self) -> Tensor:
        return self._engine.target_runner.req_to_token_pool.req_to_token

    def mark(self) -> None:
        self._engine.book.clock.mark()

    def sampling_plan(self) -> SamplingPlan | None:
        return plan_of(self._batch)

    def draft_tokens(
        self, context: DraftContext, masked: DraftBlock, randomness: Randomness | None
    ) -> DraftOutput:
        engine = self._engine
        if engine.plan_stream is not None:
            # everything about the verify pass but its tokens is known
            engine.plan_stream.wait_stream(engine.device_module.current_stream())
            with engine.device_module.stream(engine.plan_stream):
                self._plan_verify(masked)
        forward_batch = compat.ForwardBatch(
            forward_mode=compat.ForwardMode.TARGET_VERIFY,
            batch_size=context.anchors.shape[0],
            input_ids=masked.token_ids.flatten(),
            req_pool_indices=context.rows,
            seq_lens=context.lens,
            out_cache_loc=masked.slots.flatten(),
            seq_lens_sum=int(self._lens_bound.sum()),
            seq_lens_cpu=self._lens_bound,
            positions=masked.positions.flatten(),
            spec_algorithm=compat.SpeculativeAlgorithm.DFLASH,
            spec_info=engine.block_input,
            capture_hidden_mode=compat.CaptureHiddenMode.NULL,
        )
        result = engine.draft_runner.forward(forward_batch)
        if result.can_run_graph:
            drafts, logits = engine.drafts_of_graph(forward_batch.batch_size)
        else:
            noise = None if randomness is None else Noise(randomness.keys, randomness.scales)
            drafts, logits = engine.draft_head(result.logits_output.hidden_states, noise)
        return DraftOutput(argmax_drafts=drafts[0], sampled_drafts=drafts[-1], logits=logits)

    def _plan_verify(self, block: DraftBlock) -> None:
        """Lay out the verify pass; its tokens are read from the block when it runs."""
        engine, batch = self._engine, self._batch
        verify_input = compat.DFlashVerifyInput(
            draft_token=block.token_ids.flatten(),
            positions=block.positions.flatten(),
            draft_token_num=engine.config.block_size,
            capture_hidden_mode=compat.CaptureHiddenMode.FULL,
        )
        BATCH.write(
            batch,
            out_cache_loc=block.slots.flatten(),
            seq_lens_cpu=self._lens_bound,
            seq_lens_sum=int(self._lens_bound.sum()),
        )
        self.verify_batch, _ = verify_input.prepare_for_verify(batch, engine.target_worker)

    def verify_block(
        self, context: DraftContext, block: DraftBlock, plan: SamplingPlan | None
    ) -> TargetOutput:
        engine, batch = self._engine, self._batch
        if engine.plan_stream is None:
            self._plan_verify(block)
        else:
            engine.device_module.current_stream().wait_stream(engine.plan_stream)
        self.target_result = engine.target_worker.forward_batch_generation(
            batch=None,
            forward_batch=self.verify_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )
        output = self.target_result.logits_output
        features = take_features(output)
        choices = None
        if plan is None:
            greedy = engine.graph_choices if self.target_result.can_run_cuda_graph else None
            choices = engine.row_sampler.choose(
                batch,
                output,
                context,
                block,
                greedy=greedy,
                grammar_barrier=self._grammar_barrier,
            )
        return TargetOutput(
            features=features,
            choices=choices,
            logits=output.next_token_logits if choices is None else None,
            logit_cap=engine.verify_head.cap,
        )

    def publish(self, new_lens: Tensor) -> None:
        if self._on_publish is not None:
            self._on_publish(new_lens)

    def write_draft_kv(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        # a prefill has no result of a verify pass
        in_graph = self.target_result is not None and self.target_result.can_run_cuda_graph
        self._engine.write_draft_kv(features, positions, slots, in_graph=in_graph)

    def record(self, commit: Commit) -> None:
        self._engine.row_sampler.penalties.commit(self._batch.reqs, commit.token_ids, commit.lens)
        self._engine.book.batch_step()
