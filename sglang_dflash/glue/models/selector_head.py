"""Drafts that a DFlash2 drafter's selector chooses: a path through each position's candidates.

To sample, each draft is drawn from the softmax of the candidates' scores after the draft before it.
That is a distribution like a plain drafter's, except that it depends on the drafts before. Block
verification allows this: its proof takes a block as one draw from q(x_1) q(x_2 | x_1) ..., and the
rule uses q at each position only given the drafts that were in fact drawn. So the scores along the
sampled path, spread over the vocabulary with -inf for other tokens, are all that it needs, and
committed tokens follow the target's own distribution. The same holds if only the first drafts of a
block are verified: they do not depend on later ones.

What is drawn from and what is handed over must be one distribution. So scores are first rounded to
the dtype of the logits they replace, relative to the best one so that rounding spares likely
candidates, and soft-capped as the verification will cap them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.glue.models.dflash2_model import CandidateSelector
from sglang_dflash.glue.models.heads import BlockHead, Drafted, DraftHead
from sglang_dflash.kernels import Noise
from sglang_dflash.kernels.logits.reference import capped, gumbel_at


class SelectorHead(BlockHead):
    """A draft head whose drafts a selector chooses, each after the one before."""

    needs_anchors = True

    def __init__(
        self, head: DraftHead, selector: CandidateSelector, *, block_size: int, logit_cap: float
    ) -> None:
        super().__init__(head, block_size=block_size, logit_cap=logit_cap)
        self._target_head = head
        self._selector = selector

    @property
    def may_end_graphs(self) -> bool:
        # to sample from logits of several ranks, hidden states and anchors are needed again
        return self.sees_all

    def as_blocks(self, drafts: int) -> tuple[int, int]:
        wanted = self.block_size - 1
        return -(-drafts // wanted), wanted

    def draft(
        self,
        rows: Tensor,
        noise: Noise | None,
        *,
        wanted: int,
        with_confidence: bool = False,
        anchors: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Drafted:
        """Return the drafts of masked rows. With noise, the logits are those of the sampled ones,
        in place of the head's."""
        assert anchors is not None, "a selector starts from the anchors"
        head, selector = self._target_head, self._selector
        logits = head.multiply(rows, out)
        values, tokens = (
            each.unflatten(0, (-1, wanted)) for each in head.candidates(logits, selector.top_k)
        )
        hidden = rows.unflatten(0, (-1, wanted))
        scores = selector.scores(tokens, values, hidden=hidden, anchors=anchors)
        scores = (scores - scores.amax(dim=-1, keepdim=True)).to(logits.dtype)
        weights = capped(scores, self._logit_cap)
        # the best candidate after each one of the position before, then the sampled one
        steps = [weights.argmax(dim=-1)]
        if noise is not None:
            added = gumbel_at(noise.keys[:, :wanted].flatten(), tokens.flatten(0, 1))
            added = added.view_as(tokens)[:, :, None] * noise.scales.view(-1, 1, 1, 1)
            steps.append((weights + added).argmax(dim=-1))
        before, path = _follow(torch.stack(steps))
        drafts = tokens.expand(len(steps), -1, -1, -1).gather(-1, path[..., None])[..., 0]
        confidence = None
        if with_confidence:
            # the best candidate's weight is 0; along the argmax path, so nothing drawn decides
            confidence = 1 / _rows_after(before[0], weights).exp().sum(dim=-1)
        if noise is None:
            return Drafted(drafts, None, confidence)
        whole = logits if head.sees_all else logits.new_empty(len(logits), head.vocab_size)
        of_path = _rows_after(before[-1], scores).flatten(0, 1)
        whole.fill_(float("-inf")).scatter_(1, tokens.flatten(0, 1), of_path)
        return Drafted(drafts, whole.unflatten(0, (-1, wanted)), confidence)


def _follow(
    steps: Tensor,  # [p, b, n, K] int64, the next candidate after each
) -> tuple[Tensor, Tensor]:
    """Return the candidate before each position, and the one at it, along p paths; [p, b, n]."""
    at = steps.new_zeros(steps.shape[:2])
    path = [at]
    for step in steps.unbind(2):
        at = step.gather(-1, at[..., None])[..., 0]
        path.append(at)
    return torch.stack(path[:-1], dim=-1), torch.stack(path[1:], dim=-1)


def _rows_after(
    before: Tensor,  # [b, n] int64
    scores: Tensor,  # [b, n, K, K]
) -> Tensor:
    """Return the scores of each position's candidates after the one before; [b, n, K]."""
    rows = before[..., None, None].expand(-1, -1, 1, scores.shape[-1])
    return scores.gather(2, rows)[:, :, 0]
