"""A drafter's own head for a part of the target's vocabulary.

Every rank holds all of it: it is a fraction of the target's head. Its drafts are tokens of the
target. To sample, its logits are spread over the target's whole vocabulary, with -inf and so
without probability for the other tokens: rejection sampling then needs no special case.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dflash import speculators_format
from sglang_dflash.config import DrafterSpec
from sglang_dflash.glue.models.heads import multiply
from sglang_dflash.kernels import Noise, Ops


class OwnHead(nn.Module):
    """The weights of the head, and the target's token of each of its own."""

    tokens: Tensor  # [R] int64, ascending

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        assert spec.own_vocab_size is not None
        self._spec = spec
        self.lm_head = nn.Linear(spec.hidden_size, spec.own_vocab_size, bias=False)
        # random weights, as benchmarks load them, leave the first tokens
        self.register_buffer("d2t", torch.zeros(spec.own_vocab_size, dtype=torch.int64))
        self.register_buffer("tokens", torch.arange(spec.own_vocab_size))

    def named_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return what a checkpoint has to fill."""
        return {
            f"{prefix}{speculators_format.HEAD}": self.lm_head.weight,
            f"{prefix}{speculators_format.OFFSETS}": self.get_buffer("d2t"),
        }

    def check(self) -> None:
        """Derive the tokens from a loaded checkpoint. Raise ValueError unless they are different
        tokens of the target, in ascending order: a tie goes to the first."""
        offsets = self.get_buffer("d2t")
        tokens = offsets + torch.arange(len(offsets), device=offsets.device)
        is_ascending = bool((tokens.diff() > 0).all())
        if not is_ascending or not 0 <= int(tokens[0]) <= int(tokens[-1]) < self._spec.vocab_size:
            raise ValueError(
                f"The token map (d2t) of the drafter {self._spec.name} does not name "
                f"{len(tokens)} different tokens of {self._spec.vocab_size} in ascending order. "
                "Download the checkpoint again, or use another one."
            )
        self.tokens.copy_(tokens)


class OwnDraftHead:
    """An `OwnHead` with the methods of a `DraftHead`."""

    # logits of a rank are not those of the whole vocabulary: they are spread to sample
    sees_all = False

    def __init__(self, own: OwnHead, vocab_size: int, ops: Ops) -> None:
        self._own = own
        self._vocab_size = vocab_size
        self._ops = ops

    def allocate_logits(self, rows: int) -> Tensor:
        """Return a buffer for the logits of `rows` rows."""
        weight = self._own.lm_head.weight
        return weight.new_empty(rows, weight.shape[0])

    def multiply(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states [n, H] over its own vocabulary, in `out` if given."""
        weight = self._own.lm_head.weight
        return multiply(hidden.to(weight.dtype), weight, out)

    def without_vocab_padding(self, logits: Tensor) -> Tensor:
        """Return the logits: there is no padding."""
        return logits

    def all_logits(self, logits: Tensor) -> Tensor:
        """Return logits of the target's vocabulary, [n, V]: -inf for tokens it does not have."""
        whole = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._own.tokens, logits)

    def choose(self, logits: Tensor, *, logit_cap: float, noise: Noise | None) -> Tensor:
        """Return the target's token of each row's argmax and, with noise, a sampled one;
        [1 or 2, n] int64. With noise, the logits are those of the target's vocabulary."""
        if noise is not None:
            return self._ops.argmax_and_sample(logits, logit_cap, noise)
        return self._own.tokens[self._ops.argmax_rows(logits)][None]

    def confidence(self, logits: Tensor, logit_cap: float) -> Tensor:
        """Return the highest probability of each row of logits, [n] fp32."""
        return self._ops.peak_probabilities(logits, logit_cap)
