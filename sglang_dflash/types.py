"""The nouns of a DFlash step.

b = requests, B = block size, K = features per token, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftContext:
    """What a step starts from: each request's last committed token and where it stands."""

    anchors: Tensor  # [b] int64
    lens: Tensor  # [b] int64, tokens already in the target's KV = position of the anchor
    rows: Tensor  # [b] int64, the request's row in the slot table


@dataclass(frozen=True)
class DraftBlock:
    """The tokens to verify: column 0 is the anchor, columns 1..B-1 are drafts."""

    token_ids: Tensor  # [b, B] int64
    positions: Tensor  # [b, B] int64
    slots: Tensor  # [b, B] int64


@dataclass(frozen=True)
class TargetOutput:
    """What the target says about a block, row by row."""

    choices: Tensor  # [b, B] int64, the target's own token after each row
    features: Tensor  # [b * B, K * H]
    # [b] int32, the drafts to keep; None: as far as they are the target's own tokens
    num_correct: Tensor | None = None


@dataclass(frozen=True)
class Commit:
    """What a step adds to each request."""

    lens: Tensor  # [b] int32, correct drafts and the bonus
    token_ids: Tensor  # [b, B] int64, the first lens of each row count, the rest is 0
    bonus: Tensor  # [b] int64, the target's own token after the correct drafts; the next anchor
    new_lens: Tensor  # [b] int64
    slots: Tensor  # [b, B] int64, those of the committed rows, scratch for the others
