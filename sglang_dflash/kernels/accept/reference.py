"""Acceptance in torch: the specification, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

# slot 0 of every KV pool is scratch: rows to discard are written there
SCRATCH_SLOT = 0
# sentinel for `num_correct`: `accept_block` counts the leading matches of the request
COUNT_MATCHES = -1


def accept_block(
    token_ids: Tensor,  # [b, B] int64, anchor then drafts
    choices: Tensor,  # [b, B] int64, the target's token after each row
    lens: Tensor,  # [b] int64
    slots: Tensor,  # [b, B] int64
    num_correct: Tensor | None = None,  # [b] int32, overrides the leading-match count
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (commit lens [b] int32, committed tokens [b, B] padded with 0, bonus [b], new lens
    [b], slots [b, B] with every row past the commit redirected to the scratch slot).

    Draft k + 1 is correct when it equals the choice after row k and every draft before it is. The
    choice after the correct drafts is the bonus. Leading matches are counted for a request whose
    `num_correct` is COUNT_MATCHES, or for every request if `num_correct` is None.
    """
    matches = token_ids[:, 1:] == choices[:, :-1]
    leading = matches.to(torch.int32).cumprod(dim=1, dtype=torch.int32).sum(dim=1)
    if num_correct is None:
        num_correct = leading
    else:
        num_correct = torch.where(num_correct < 0, leading, num_correct)
    count = num_correct[:, None].long()
    bonus = choices.gather(1, count)
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    drafts = torch.where(columns < count, torch.roll(token_ids, -1, dims=1), 0)
    committed = torch.where(columns == count, bonus, drafts)
    kept = torch.where(columns <= count, slots, SCRATCH_SLOT)
    commit_lens = num_correct.to(torch.int32) + 1
    return commit_lens, committed, bonus.squeeze(1), lens + commit_lens, kept
