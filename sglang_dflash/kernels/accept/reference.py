"""Acceptance in torch: the specification, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.kernels.packing import num_rows_of, places, unpack

# slot 0 of every KV pool is scratch: rows to discard are written there
SCRATCH_SLOT = 0
# sentinel for `num_correct`: `accept_block` counts the leading matches of the request
COUNT_MATCHES = -1


def accept_block(
    token_ids: Tensor,  # [b, B] int64, anchor then drafts; [N] if the requests share N rows
    choices: Tensor,  # like token_ids, the target's token after each row
    lens: Tensor,  # [b] int64
    slots: Tensor,  # like token_ids
    num_correct: Tensor | None = None,  # [b] int32, overrides the leading-match count
    bounds: Tensor | None = None,  # [b + 1] int64, of each request's rows if they are shared
    width: int | None = None,  # B, if the rows are shared
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (commit lens [b] int32, committed tokens [b, B] padded with 0, bonus [b], new lens
    [b], slots with every row past the commit redirected to the scratch slot).

    Draft k + 1 is correct when it equals the choice after row k and every draft before it is. The
    choice after the correct drafts is the bonus. Leading matches are counted for a request whose
    `num_correct` is COUNT_MATCHES, or for every request if `num_correct` is None. A request that
    shares rows has one draft fewer than it has rows, and can keep no more.
    """
    if bounds is None:
        num_drafts = torch.full_like(lens, token_ids.shape[1] - 1, dtype=torch.int32)
    else:
        assert width is not None, "packed rows do not show the width"
        token_ids, choices = (unpack(each, bounds, width) for each in (token_ids, choices))
        num_drafts = (num_rows_of(bounds) - 1).int()
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    matches = (token_ids[:, 1:] == choices[:, :-1]) & (columns[:-1] < num_drafts[:, None])
    leading = matches.to(torch.int32).cumprod(dim=1, dtype=torch.int32).sum(dim=1)
    if num_correct is None:
        num_correct = leading
    else:
        given = torch.minimum(num_correct, num_drafts)
        num_correct = torch.where(num_correct < 0, leading, given)
    count = num_correct[:, None].long()
    bonus = choices.gather(1, count)
    drafts = torch.where(columns < count, torch.roll(token_ids, -1, dims=1), 0)
    committed = torch.where(columns == count, bonus, drafts)
    is_kept = columns <= count
    if bounds is not None:
        is_kept = is_kept[places(bounds, slots.shape[0])]
    kept = torch.where(is_kept, slots, SCRATCH_SLOT)
    commit_lens = num_correct.to(torch.int32) + 1
    return commit_lens, committed, bonus.squeeze(1), lens + commit_lens, kept
