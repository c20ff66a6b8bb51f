"""Acceptance: one program per request counts the leading matches and lays out the commit.

Layout contract: token_ids, choices and slots [b, B] contiguous, or [N] if the requests share rows
(SHARED), the rest [b] contiguous. No tensor is read on the host. WALK means that `num_correct` is
None and not loaded. The width is a runtime value: it may change from step to step, and a step must
not wait for a compiler.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.kernels.accept.reference import SCRATCH_SLOT
from sglang_dflash.kernels.extents import padded


# fmt: off
@triton.jit(do_not_specialize=["width"])
def _accept_block(
    token_ids, choices, lens, slots, num_correct, bounds,
    commit_lens, committed, bonus, new_lens, kept, scratch, width,
    WALK: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    request = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    of_request = request * width + column
    at, rows = of_request, width
    if SHARED:
        first = tl.load(bounds + request)
        at, rows = first + column, (tl.load(bounds + request + 1) - first).to(tl.int32)
    live = column < rows
    choice = tl.load(choices + at, mask=live, other=0)
    draft = tl.load(token_ids + at + 1, mask=column < rows - 1, other=0)
    wrong = (draft != choice) | (column >= rows - 1)
    # the first wrong column is the number of correct drafts
    count = tl.min(tl.where(wrong, column, BLOCK), 0)
    if not WALK:
        given = tl.load(num_correct + request)
        count = tl.where(given < 0, count, tl.minimum(given, rows - 1))
    token = tl.where(column < count, draft, tl.where(column == count, choice, 0))
    tl.store(committed + of_request, token, mask=column < width)
    tl.store(bonus + request, tl.sum(tl.where(column == count, choice, 0), 0))
    tl.store(commit_lens + request, count + 1)
    tl.store(new_lens + request, tl.load(lens + request) + count + 1)
    slot = tl.load(slots + at, mask=live, other=0)
    tl.store(kept + at, tl.where(column <= count, slot, scratch), mask=live)


def accept_block(
    token_ids: Tensor,
    choices: Tensor,
    lens: Tensor,
    slots: Tensor,
    num_correct: Tensor | None = None,
    bounds: Tensor | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Triton version of `reference.accept_block`."""
    requests = lens.shape[0]
    if bounds is None:
        width = token_ids.shape[1]
    assert width is not None, "packed rows do not show the width"
    commit_lens = torch.empty(requests, dtype=torch.int32, device=token_ids.device)
    committed, kept = token_ids.new_empty(requests, width), torch.empty_like(slots)
    bonus, new_lens = torch.empty_like(lens), torch.empty_like(lens)
    _accept_block[(requests,)](
        *(token_ids, choices, lens, slots, num_correct, bounds),
        *(commit_lens, committed, bonus, new_lens, kept, SCRATCH_SLOT, width),
        *(num_correct is None, bounds is not None, padded(width)),
        num_warps=1,
    )
    return commit_lens, committed, bonus, new_lens, kept
