"""Accept length of generations, and its upper bound under sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_dflash.reference.generate import Choose, Generation, greedy


def accept_length(generations: Sequence[Generation]) -> float:
    """Return the mean tokens kept per verify step; the token of the prefill is not counted."""
    steps = sum(len(g.blocks) for g in generations)
    return sum(len(g.token_ids) - 1 for g in generations) / max(steps, 1)


def histogram(generations: Sequence[Generation]) -> dict[int, int]:
    """Return the number of verify steps by tokens committed, before truncation at an end token."""
    return dict(sorted(Counter(n for g in generations for n in g.commit_lens).items()))


def sample_at(temperature: float, *, seed: int) -> Choose:
    """Return a sampler of the full softmax, seeded by position; temperature 0 is greedy."""
    if not temperature:
        return greedy

    def choose(logits: Tensor, before: Sequence[int]) -> int:
        generator = torch.Generator().manual_seed((seed << 32) + len(before))
        # Gumbel-max: minus the log of an exponential variable is Gumbel noise
        exponential = torch.empty(logits.shape[0]).exponential_(generator=generator)
        return int((logits.float().cpu() / temperature - exponential.log()).argmax())

    return choose


class Ideal:
    """The accept length of an ideal drafter, which always drafts the target's argmax.

    Wraps a sampler and records where it picked the argmax. Sampled text departs from the argmax,
    which bounds the accept length that training can be expected to reach.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._is_argmax: dict[int, bool] = {}
        self._tokens = self._steps = 0

    def __call__(self, logits: Tensor, before: Sequence[int]) -> int:
        token = self._choose(logits, before)
        # positions after a rejected draft are verified again, and overwritten
        self._is_argmax[len(before)] = token == int(logits.argmax())
        return token

    def count(self, generation: Generation, *, prompt_len: int, block_size: int) -> None:
        """Replay one finished generation with argmax drafts, and reset the record."""
        at, last = prompt_len, prompt_len + len(generation.token_ids) - 1
        while at < last:
            end = min(at + block_size, last)
            at = next((k for k in range(at + 1, end) if not self._is_argmax[k]), end)
            self._steps += 1
        self._tokens += len(generation.token_ids) - 1
        self._is_argmax = {}

    @property
    def accept_length(self) -> float:
        return self._tokens / max(self._steps, 1)
