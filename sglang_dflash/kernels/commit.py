"""Acceptance and commit: one program walks one request's block.

Layout contract: token_ids, choices and slots [b, B] contiguous, the rest [b] contiguous. Nothing
here reads a tensor on the host.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.reference import SCRATCH_SLOT


@triton.jit
def _accept_walk(token_ids, choices, num_correct, bonus, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    at = request * WIDTH + column
    choice = tl.load(choices + at, mask=column < WIDTH, other=0)
    draft = tl.load(token_ids + at + 1, mask=column < WIDTH - 1, other=0)
    wrong = (draft != choice) | (column >= WIDTH - 1)
    # the first wrong column is how many drafts are right
    count = tl.min(tl.where(wrong, column, BLOCK), 0)
    tl.store(num_correct + request, count)
    tl.store(bonus + request, tl.sum(tl.where(column == count, choice, 0), 0))


# fmt: off
@triton.jit
def _commit_tokens(
    token_ids, num_correct, bonus, lens, commit_lens, committed, new_lens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    request = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    at = request * WIDTH + column
    count = tl.load(num_correct + request)
    last = tl.load(bonus + request)
    draft = tl.load(token_ids + at + 1, mask=column < count, other=0)
    tl.store(committed + at, tl.where(column == count, last, draft), mask=column < WIDTH)
    tl.store(commit_lens + request, count + 1)
    tl.store(new_lens + request, tl.load(lens + request) + count + 1)


@triton.jit
def _committed_slots(slots, commit_lens, kept, scratch, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    at = request * WIDTH + column
    live = column < WIDTH
    slot = tl.load(slots + at, mask=live, other=0)
    keep = column < tl.load(commit_lens + request)
    tl.store(kept + at, tl.where(keep, slot, scratch), mask=live)


def accept_walk(token_ids: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `reference.accept_walk` does."""
    requests, width = token_ids.shape
    num_correct = torch.empty(requests, dtype=torch.int32, device=token_ids.device)
    bonus = torch.empty(requests, dtype=torch.int64, device=token_ids.device)
    _accept_walk[(requests,)](
        token_ids, choices, num_correct, bonus, width, triton.next_power_of_2(width), num_warps=1
    )
    return num_correct, bonus


def commit_tokens(
    token_ids: Tensor, num_correct: Tensor, bonus: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `reference.commit_tokens` does."""
    requests, width = token_ids.shape
    commit_lens = torch.empty_like(num_correct)
    committed = torch.empty_like(token_ids)
    new_lens = torch.empty_like(lens)
    _commit_tokens[(requests,)](
        *(token_ids, num_correct, bonus, lens, commit_lens, committed, new_lens),
        *(width, triton.next_power_of_2(width)),
        num_warps=1,
    )
    return commit_lens, committed, new_lens


def committed_slots(slots: Tensor, commit_lens: Tensor) -> Tensor:
    """Do what `reference.committed_slots` does."""
    requests, width = slots.shape
    kept = torch.empty_like(slots)
    _committed_slots[(requests,)](
        *(slots, commit_lens, kept, SCRATCH_SLOT, width, triton.next_power_of_2(width)),
        num_warps=1,
    )
    return kept
