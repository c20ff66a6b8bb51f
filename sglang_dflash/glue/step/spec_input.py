"""State that a running batch carries between decode steps, and a step's KV allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.glue import changes, compat, seams

BATCH = changes.Fields(
    "ScheduleBatch",
    {
        "seq_lens_cpu": "host-side lengths are the committed ones",
        "seq_lens_sum": "host-side lengths are the committed ones",
    },
)
REQ = changes.Fields("Req", {"decode_batch_idx": "counts decode steps, as SGLang does elsewhere"})


class DFlashState(compat.SpecInput):
    """Each request's next anchor and length.

    With overlap scheduling both travel through the scheduler's future map, keyed by
    `future_indices`; without it they are read from here.
    """

    # the scheduler's relay reads these for every algorithm; DFlash has none of them
    topk_p = None
    topk_index = None
    hidden_states = None

    def __init__(
        self,
        bonus_tokens: Tensor,
        new_seq_lens: Tensor,
        *,
        future_indices: Tensor | None = None,
        arrived: Sequence[Any] = (),
    ) -> None:
        """`arrived` are requests that another server has prefilled: their first step also starts
        the state that a prefill would have started."""
        super().__init__(compat.SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1
        self.bonus_tokens = bonus_tokens
        self.new_seq_lens = new_seq_lens
        self.future_indices = future_indices
        # host-side upper bound of each request's length during the next step
        self.reserved_lens: Tensor | None = None
        self.arrived = list(arrived)

    def prepare_for_decode(self, batch: Any) -> None:
        """Allocate every request's KV slots for the next block, and free its out-of-window KV.

        The host's committed lengths may lag the device by one step under overlap, so two blocks are
        reserved.
        """
        seams.free_left_windows(batch)
        reserve = compat.alloc_reserve_per_decode()
        page_size = batch.token_to_kv_pool_allocator.page_size
        row_width = batch.req_to_token_pool.req_to_token.shape[1]
        committed = [seams.committed_len(req) for req in batch.reqs]
        allocated = [req.kv.kv_allocated_len for req in batch.reqs]
        # whole pages: the allocator's granularity
        wanted = [
            max(before, -(-(length + reserve) // page_size) * page_size)
            for length, before in zip(committed, allocated, strict=True)
        ]
        for req in batch.reqs:
            REQ.write(req, decode_batch_idx=req.decode_batch_idx + 1)
        assert max(wanted) <= row_width, (
            f"a block would reach slot-table column {max(wanted)} of {row_width}, "
            "into the next request's row"
        )
        cur_cpu = torch.tensor(allocated, dtype=torch.int32)
        nxt_cpu = torch.tensor(wanted, dtype=torch.int32)
        compat.alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=cur_cpu.to(batch.device, non_blocking=True),
            cur_kv_lens_cpu=cur_cpu,
            nxt_kv_lens=nxt_cpu.to(batch.device, non_blocking=True),
            nxt_kv_lens_cpu=nxt_cpu,
            num_needed_tokens=sum(wanted) - sum(allocated),
            batch=batch,
        )
        seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        BATCH.write(batch, seq_lens_cpu=seq_lens_cpu, seq_lens_sum=sum(committed))
        self.reserved_lens = nxt_cpu.long()

    def filter_batch(
        self, new_indices: Tensor, new_indices_cpu: list[int] | None = None, **_unused: Any
    ) -> None:
        """Keep the given requests."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: DFlashState) -> None:
        """Append another batch's requests."""
        self.arrived = self.arrived + other.arrived
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])
