"""The data types of a DFlash step.

b = requests, B = block size, W = verify width (1 to B), V = vocabulary, K = features per token,
H = hidden size. A step verifies n rows: b * W, or fewer if they are shared out among the requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftContext:
    """The input of a step: each request's last committed token and its position."""

    anchors: Tensor  # [b] int64
    lens: Tensor  # [b] int64, tokens already in the target's KV = position of the anchor
    request_rows: Tensor  # [b] int64, each request's row in the slot table


@dataclass(frozen=True)
class RowShare:
    """How many rows a batch verifies in all. They go to the drafts that are likeliest to be kept:
    probability = sigmoid(offset + slope * logit(confidence)), by draft position."""

    num_rows: int
    offsets: Tensor  # [B - 1] fp32
    slopes: Tensor  # [B - 1] fp32


@dataclass(frozen=True)
class BlockRows:
    """The rows of a verify pass, request by request."""

    token_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    slots: Tensor  # [n] int64


@dataclass(frozen=True)
class SharedRows(BlockRows):
    """Rows of requests that verify different numbers of them."""

    bounds: Tensor  # [b + 1] int64, the first row of each request, then n
    requests: Tensor  # [n] int64, the request of each row

    def columns(self) -> Tensor:
        """Return each row's column in its block, [n] int64."""
        numbers = torch.arange(self.requests.shape[0], device=self.requests.device)
        return numbers - self.bounds[self.requests]


@dataclass(frozen=True)
class DraftBlock:
    """The tokens to draft (W = B) or to verify: column 0 is the anchor, the others are drafts."""

    token_ids: Tensor  # [b, W] int64
    positions: Tensor  # [b, W] int64
    slots: Tensor  # [b, W] int64
    shared: SharedRows | None = None  # the rows that are verified, if not all

    @property
    def rows(self) -> BlockRows:
        """The rows that are verified."""
        if self.shared is not None:
            return self.shared
        return BlockRows(self.token_ids.flatten(), self.positions.flatten(), self.slots.flatten())

    @property
    def num_rows(self) -> int:
        shown = self.token_ids if self.shared is None else self.shared.token_ids
        return shown.numel()


@dataclass(frozen=True)
class SamplingPlan:
    """Sampling parameters of each request, for batches that our kernels sample."""

    temperatures: Tensor  # [b] fp32
    top_ks: Tensor  # [b] int, 1 for a greedy request; above MAX_TOP_K: unfiltered
    top_ps: Tensor  # [b] fp32
    # known on the host: whether any request uses top_k and top_p, or the full vocabulary
    any_top_k: bool
    any_unfiltered: bool


@dataclass(frozen=True)
class Randomness:
    """The random numbers of a step."""

    keys: Tensor  # [b, B] int64, keys of each row's Gumbel noise
    scales: Tensor  # [b] fp32, the temperature; 0 for a greedy request, which has no noise
    uniforms: Tensor  # [b, B - 1] fp32, in [0, 1): one per draft


@dataclass(frozen=True)
class DraftOutput:
    """The drafter's proposals for each masked row."""

    argmax_drafts: Tensor  # [b, B - 1] int64
    # [b, B - 1] int64, at each request's temperature; the argmax drafts where none were sampled
    sampled_drafts: Tensor
    # [b, B - 1, V]; None if nothing was sampled on a rank that holds a shard of the vocabulary
    logits: Tensor | None = None
    # [b, B - 1] fp32, the drafter's highest probability at each position, if it was asked for. Not
    # that of a sampled draft: which rows are verified must not depend on what was drawn
    confidence: Tensor | None = None

    def first(self, drafts: int) -> DraftOutput:
        """Return the first drafts of each block only."""
        logits = None if self.logits is None else self.logits[:, :drafts]
        confidence = None if self.confidence is None else self.confidence[:, :drafts]
        return DraftOutput(
            self.argmax_drafts[:, :drafts], self.sampled_drafts[:, :drafts], logits, confidence
        )


@dataclass(frozen=True)
class SampledDrafts:
    """Both kinds of drafts of a sampled step, and which of them are verified."""

    argmax_drafts: Tensor  # [b, W - 1] int64
    sampled_drafts: Tensor  # [b, W - 1] int64
    is_sampled: Tensor  # [b] bool: whether a request verifies its sampled drafts
    verified: Tensor  # [b, W - 1] int64
    draft_logits: Tensor | None  # [b, W - 1, V], as in DraftOutput
    randomness: Randomness

    @classmethod
    def none(cls, randomness: Randomness) -> SampledDrafts:
        """Return those of a step at width 1, which only samples from the target."""
        empty = torch.empty_like(randomness.keys[:, :0])
        is_sampled = torch.empty_like(randomness.scales, dtype=torch.bool)
        return cls(empty, empty, is_sampled, empty, None, randomness)


@dataclass(frozen=True)
class Proposal:
    """The block of a step and, if our kernels sample, how its drafts were obtained."""

    block: DraftBlock
    drafts: SampledDrafts | None = None
    confidence: Tensor | None = None  # [b, W - 1] fp32, if rows are shared


@dataclass(frozen=True)
class TargetOutput:
    """The target's output for each row of a block: its choices, or the logits for them."""

    features: Tensor  # [n, K * H]
    # [b, W] int64, [n] if rows are shared: the target's own token after each row, if the host has
    # chosen
    choices: Tensor | None = None
    logits: Tensor | None = None  # [n, V] as the LM head wrote them, if the host has not
    logit_cap: float = 0.0  # softcap still to be applied to the logits; 0 for none


@dataclass(frozen=True)
class Verdict:
    """Which drafts each request keeps, and the target's own tokens."""

    # [b, W] int64, [n] if rows are shared: the token after each row; after kept drafts the bonus
    choices: Tensor
    # [b] int32, drafts to keep; COUNT_MATCHES to count the leading matches; None: that for all
    num_correct: Tensor | None = None
    # [b, W - 1] fp32, acceptance probability of a sampled draft minus that of an argmax draft
    advantage: Tensor | None = None

    def decisions(self) -> list[Tensor]:
        """Return what the step and later ones depend on."""
        found = (self.choices, self.num_correct, self.advantage)
        return [tensor for tensor in found if tensor is not None]


@dataclass(frozen=True)
class Commit:
    """The tokens that a step commits to each request."""

    lens: Tensor  # [b] int32, number of correct drafts, plus 1 for the bonus
    token_ids: Tensor  # [b, W] int64, valid in the first lens columns, 0 in the rest
    bonus: Tensor  # [b] int64, the target's own token after the correct drafts; the next anchor
    new_lens: Tensor  # [b] int64
    # [b, W] int64, [n] if rows are shared: slots of committed rows, the scratch slot for the rest
    slots: Tensor
    # if rows were shared: what to learn from, [b + 1] int64 and [b, W - 1] fp32
    bounds: Tensor | None = None
    confidence: Tensor | None = None
