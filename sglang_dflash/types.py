"""The nouns of a DFlash step.

b = requests, B = block size, V = vocabulary, K = features per token, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftContext:
    """What a step starts from: each request's last committed token and where it stands."""

    anchors: Tensor  # [b] int64
    lens: Tensor  # [b] int64, tokens already in the target's KV = position of the anchor
    request_rows: Tensor  # [b] int64, each request's row in the slot table


@dataclass(frozen=True)
class DraftBlock:
    """The tokens to verify: column 0 is the anchor, columns 1..B-1 are drafts."""

    token_ids: Tensor  # [b, B] int64
    positions: Tensor  # [b, B] int64
    slots: Tensor  # [b, B] int64


@dataclass(frozen=True)
class SamplingPlan:
    """What each request of a batch asks for, where our kernels sample."""

    temperatures: Tensor  # [b] fp32
    top_ks: Tensor  # [b] int, 1 for a greedy request; above MAX_TOP_K: unfiltered
    top_ps: Tensor  # [b] fp32
    # known on the host: whether a request samples by top_k and top_p, or from every token
    any_top_k: bool
    any_unfiltered: bool


@dataclass(frozen=True)
class Randomness:
    """The random numbers of a step."""

    keys: Tensor  # [b, B] int64, of the Gumbel noise of each row
    scales: Tensor  # [b] fp32, the temperature; 0 for a greedy request, which has no noise
    uniforms: Tensor  # [b, B - 1] fp32, in [0, 1): one for each draft


@dataclass(frozen=True)
class DraftOutput:
    """What the drafter proposes for each masked row."""

    argmax_drafts: Tensor  # [b, B - 1] int64
    # [b, B - 1] int64, at each request's temperature; the argmax drafts where none were sampled
    sampled_drafts: Tensor
    # [b, B - 1, V]; None on a rank that sees a part of the vocabulary
    logits: Tensor | None = None


@dataclass(frozen=True)
class SampledDrafts:
    """How a step that samples got its drafts, and which of both kinds are verified."""

    argmax_drafts: Tensor  # [b, B - 1] int64
    sampled_drafts: Tensor  # [b, B - 1] int64
    is_sampled: Tensor  # [b] bool: whether a request verifies its sampled drafts
    verified: Tensor  # [b, B - 1] int64
    draft_logits: Tensor | None  # [b, B - 1, V], as in DraftOutput
    randomness: Randomness


@dataclass(frozen=True)
class Proposal:
    """The block of a step and, where our kernels sample, how its drafts came about."""

    block: DraftBlock
    drafts: SampledDrafts | None = None


@dataclass(frozen=True)
class TargetOutput:
    """What the target says about a block, row by row: its choices, or the logits for them."""

    features: Tensor  # [b * B, K * H]
    # [b, B] int64, the target's own token after each row, where the host has chosen
    choices: Tensor | None = None
    logits: Tensor | None = None  # [b * B, V] as the head wrote them, where it has not
    logit_cap: float = 0.0  # still to be applied to the logits; 0 for none


@dataclass(frozen=True)
class Verdict:
    """Which drafts each request keeps, and the target's own tokens."""

    choices: Tensor  # [b, B] int64, the token after each row; after the kept drafts the bonus
    # [b] int32, the drafts to keep, COUNT_MATCHES for as many as match; None: so for all requests
    num_correct: Tensor | None = None
    # [b, B - 1] fp32, the chance that a sampled draft is kept less that of an argmax draft
    advantage: Tensor | None = None


@dataclass(frozen=True)
class Commit:
    """What a step adds to each request."""

    lens: Tensor  # [b] int32, correct drafts and the bonus
    token_ids: Tensor  # [b, B] int64, the first lens of each row count, the rest is 0
    bonus: Tensor  # [b] int64, the target's own token after the correct drafts; the next anchor
    new_lens: Tensor  # [b] int64
    slots: Tensor  # [b, B] int64, those of the committed rows, scratch for the others
