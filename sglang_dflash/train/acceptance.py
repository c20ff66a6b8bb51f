"""Accept length, its histogram, and the bound that sampling sets to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_dflash.reference.generate import Choose, Generation, greedy


def accept_length(generations: Sequence[Generation]) -> float:
    """Return the mean tokens kept per verify step; tokens from prefill not counted."""
    steps = sum(len(g.blocks) for g in generations)
    return sum(len(g.token_ids) - 1 for g in generations) / max(steps, 1)


def histogram(generations: Sequence[Generation]) -> dict[int, int]:
    """Return how often a verify step committed each number of tokens, as verified."""
    return dict(sorted(Counter(n for g in generations for n in g.commit_lens).items()))


def sample_at(temperature: float, *, seed: int) -> Choose:
    """Return a rule that draws each token from its whole distribution; 0 is greedy."""
    if not temperature:
        return greedy

    def choose(logits: Tensor, before: Sequence[int]) -> int:
        generator = torch.Generator().manual_seed((seed << 32) + len(before))
        waited = torch.empty(logits.shape[0]).exponential_(generator=generator)
        return int((logits.float().cpu() / temperature - waited.log()).argmax())

    return choose


class Ideal:
    """The accept length of an ideal drafter: one whose every draft is the target's likeliest token.

    Wraps a rule of choice and notes where the choice was that token. Sampled text departs from it,
    and so bounds what training can reach.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._likeliest: dict[int, bool] = {}
        self._tokens = self._steps = 0

    def __call__(self, logits: Tensor, before: Sequence[int]) -> int:
        token = self._choose(logits, before)
        # a place behind a wrong draft is chosen again, with the right tokens before it
        self._likeliest[len(before)] = token == int(logits.argmax())
        return token

    def count(self, generation: Generation, *, prompt_len: int, block_size: int) -> None:
        """Walk one finished generation as that drafter would, and begin anew."""
        at, last = prompt_len, prompt_len + len(generation.token_ids) - 1
        while at < last:
            end = min(at + block_size, last)
            at = next((k for k in range(at + 1, end) if not self._likeliest[k]), end)
            self._steps += 1
        self._tokens += len(generation.token_ids) - 1
        self._likeliest = {}

    @property
    def accept_length(self) -> float:
        return self._tokens / max(self._steps, 1)
