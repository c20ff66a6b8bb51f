"""Server-lifetime state that a step uses: both models, heads, graphs, cache and sampler."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash import mask_embedding
from sglang_dflash.buffers import StepBuffers
from sglang_dflash.config import DFlashConfig
from sglang_dflash.glue import compat, seams
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping
from sglang_dflash.glue.models.embedding import input_embedding
from sglang_dflash.glue.models.heads import BlockHead, DraftHead, VerifyHead
from sglang_dflash.glue.models.own_head import OwnDraftHead
from sglang_dflash.glue.models.selector_head import SelectorHead
from sglang_dflash.glue.sampling.penalties import PenaltyTable
from sglang_dflash.glue.sampling.row_sampler import RowSampler
from sglang_dflash.glue.startup import ranks
from sglang_dflash.glue.step.agreement import Agreement, Comparison
from sglang_dflash.glue.step.draft_cache import DraftCache
from sglang_dflash.glue.step.graph_outputs import DraftGraphs, VerifyGraphs
from sglang_dflash.glue.step.recurrent_states import RecurrentStates
from sglang_dflash.glue.step.verify_graphs import VerifyGraphRunner
from sglang_dflash.kernels import Ops


class DFlashRuntime:
    """Both models, their heads and graphs, the draft cache and the sampler of one worker."""

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
        self.target_worker = target_worker
        self.target_runner = target_worker.model_runner
        self.draft_runner = draft_runner
        target_model = self.target_runner.model
        mask = config.drafter.mask_embedding(mask_embedding.find(config.drafter.name))
        draft_runner.model.share_embedding(input_embedding(target_model), mask)
        device_type = torch.device(draft_runner.device).type
        # torch.cuda; on a CPU torch.cpu, whose streams are no-ops: everything runs in order
        self.device_module = torch.get_device_module(device_type)
        self.plan_stream = self.device_module.Stream() if config.overlap.plan_stream else None
        self.verify_head = VerifyHead(target_model, ops, device_type=device_type)
        self.block_head = self._block_head(ops)
        self.row_sampler = RowSampler(
            self.target_runner.sampler,
            self.verify_head,
            PenaltyTable(self.target_runner.model_config.vocab_size, draft_runner.device),
        )
        group = compat.get_tp_group()
        self.agreement = Agreement(group)
        self.comparison = Comparison(group, is_on=config.compares_ranks, end=ranks.end_server)
        self.draft_cache = DraftCache(draft_runner, ops)
        self.verify_graphs = VerifyGraphs(
            self.verify_head, self.draft_cache, block_size=config.block_size
        )
        self.draft_graphs = DraftGraphs(self.block_head)
        self.states = RecurrentStates.of(self.target_runner)
        self.buffers: StepBuffers
        self._graphs: VerifyGraphRunner | None = None
        # whether the requests of a step may verify different numbers of rows
        self.shares_rows = False
        # whether a step may have several passes. The experts and indices that SGLang returns for
        # its tokens are those of one
        server_args = seams.settings(self.target_runner.server_args)
        returns_more = (
            server_args.enable_return_routed_experts or server_args.enable_return_indexer_topk
        )
        self.may_repeat = self.states is None and not returns_more
        self.sends_by_remainder = seams.sends_by_remainder
        self._stream_interval = server_args.stream_interval
        self.block_input = compat.DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=config.block_size,
            capture_hidden_mode=compat.CaptureHiddenMode.NULL,
        )

    def _block_head(self, ops: Ops) -> BlockHead:
        model, drafter = self.draft_runner.model, self.config.drafter
        how: dict[str, Any] = {
            "block_size": self.config.block_size,
            "logit_cap": self.verify_head.cap,
        }
        if model.own_head is not None:
            own = OwnDraftHead(model.own_head, drafter.vocab_size, ops)
            return BlockHead(own, from_anchor=drafter.samples_from_anchor, **how)
        head = DraftHead(self.target_runner.model, drafter.vocab_size, ops)
        if drafter.dflash2 is None:
            return BlockHead(head, from_anchor=drafter.samples_from_anchor, **how)
        model.run_blocks_of(self.config.block_size)
        return SelectorHead(head, model.candidate_selector, **how)

    def is_sent_in_parts(self, req: Any) -> bool:
        """Return whether a streaming request is sent several tokens at a time."""
        interval = req.sampling_params.stream_interval or self._stream_interval
        return bool(req.stream) and interval > 1

    def allocate(self, max_requests: int) -> None:
        """Allocate the step's buffers, once it is known how many requests may run."""
        self.buffers = StepBuffers(max_requests, self.config.block_size, self.draft_runner.device)

    def use_graphs(self, graphs: VerifyGraphRunner) -> None:
        """Verify in these graphs, once they are captured."""
        self._graphs = graphs

    def share_rows(self) -> None:
        """Let the requests of a step verify different numbers of rows."""
        self.shares_rows = True

    def graph_for(self, rows: int, keys: int) -> int | None:
        """Return the rows of the verify graph for so many rows of a batch with at most this many
        keys in its prefixes; None if it runs outside our graphs."""
        return None if self._graphs is None else self._graphs.graph_for(rows, keys)

    def holds(self, keys: int) -> bool:
        """Return whether a batch with so many keys in its prefixes fits into our graphs, or there
        are none."""
        return self._graphs is None or self._graphs.holds(keys)
