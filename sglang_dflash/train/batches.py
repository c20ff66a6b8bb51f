"""From chats to padded batches: which tokens exist, and which ones an assistant said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    token_ids: tuple[int, ...]
    answer_mask: tuple[bool, ...]  # True on answers, their end token included


@dataclass(frozen=True)
class Batch:
    # padding on the right needs no attention mask: causal attention never looks that way
    token_ids: Tensor  # [b, S] int64
    answer_mask: Tensor  # [b, S] bool
    lens: Tensor  # [b] int64


def render(tokenizer: Any, messages: list[dict[str, str]], *, ask: bool) -> str:
    """Return the chat as text; `ask` opens the assistant's next turn."""
    if not messages:
        return ""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def encode_prompt(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens a server would give the model for this chat."""
    return encode(tokenizer, render(tokenizer, messages, ask=True))


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> Example:
    """Return the whole chat with every assistant answer marked."""
    ids: list[int] = []
    mask: list[bool] = []
    done = ""
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = render(tokenizer, messages[:k], ask=True)
        prompt_ids = encode(tokenizer, asked.removeprefix(done))
        answer_ids = [*encode(tokenizer, message["content"]), tokenizer.eos_token_id]
        ids += prompt_ids + answer_ids
        mask += [False] * len(prompt_ids) + [True] * len(answer_ids)
        done = asked + message["content"] + tokenizer.eos_token
    return Example(tuple(ids), tuple(mask))


def collate(examples: Sequence[Example], *, pad_id: int) -> Batch:
    """Pad on the right to the longest example."""
    longest = max(len(e.token_ids) for e in examples)
    ids = [[*e.token_ids] + [pad_id] * (longest - len(e.token_ids)) for e in examples]
    mask = [[*e.answer_mask] + [False] * (longest - len(e.token_ids)) for e in examples]
    lens = [len(e.token_ids) for e in examples]
    return Batch(torch.tensor(ids), torch.tensor(mask), torch.tensor(lens))


def iterate_batches(
    examples: Sequence[Example],
    *,
    tokens_per_batch: int,
    pad_id: int,
    seed: int,
    rows_per_batch: int | None = None,
) -> Iterator[Batch]:
    """Yield shuffled batches for ever; examples of like length share one, to waste no padding."""
    rng = Random(seed)
    while True:
        # the noise keeps neighbours in length from meeting in every epoch
        ordered = sorted(examples, key=lambda e: len(e.token_ids) * rng.uniform(0.9, 1.1))
        groups: list[list[Example]] = [[]]
        longest = 0
        for example in ordered:
            longest = max(longest, len(example.token_ids))
            rows = len(groups[-1])
            if rows and (longest * (rows + 1) > tokens_per_batch or rows == rows_per_batch):
                groups.append([])
                longest = len(example.token_ids)
            groups[-1].append(example)
        rng.shuffle(groups)
        for group in groups:
            yield collate(group, pad_id=pad_id)
