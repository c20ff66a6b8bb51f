"""The held-out split: by prompt, so that nothing is learned about the prompts of the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_dflash.train.answers import Answer
from sglang_dflash.train.turns import prompt_key


@dataclass(frozen=True)
class Split:
    held_out: list[Answer]  # one of each held-out prompt
    training: list[Answer]
    left_out: int  # further answers to held-out prompts


def split_answers(answers: Mapping[str, Answer], *, prompts: int) -> Split:
    """Hold out the first `prompts` prompts of answers that are sorted by key.

    Of a held-out prompt's answers, the one with the lowest temperature is kept: the greedy one,
    where there is one.
    """
    by_prompt: dict[str, list[Answer]] = {}
    for key, answer in answers.items():
        by_prompt.setdefault(prompt_key(key), []).append(answer)
    groups = list(by_prompt.values())
    held_out = [min(group, key=lambda a: a.temperature) for group in groups[:prompts]]
    training = [answer for group in groups[prompts:] for answer in group]
    return Split(held_out, training, len(answers) - len(held_out) - len(training))
