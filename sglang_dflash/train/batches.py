"""Chats as token ids, with a mask of the answer tokens, in padded batches bucketed by length."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """One sequence, in compact arrays: a million examples fit in memory."""

    token_ids: array[int]
    answer_mask: bytearray  # 1 on answer tokens, including the end token


def make_example(token_ids: Sequence[int], answer_mask: Sequence[int]) -> Example:
    return Example(array("i", token_ids), bytearray(answer_mask))


@dataclass(frozen=True)
class Batch:
    # right padding needs no attention mask: causal attention never sees it
    token_ids: Tensor  # [b, S] int64
    answer_mask: Tensor  # [b, S] bool
    lens: Tensor  # [b] int64

    def to(self, device: torch.device) -> Batch:
        return Batch(*(t.to(device) for t in (self.token_ids, self.answer_mask, self.lens)))


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    *,
    ask: bool,
    thinking: bool | None = None,
) -> str:
    """Return the chat as text. `ask` adds the generation prompt; `thinking` None leaves
    enable_thinking to the template."""
    if not messages:
        return ""
    switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=ask, **switch
    )
    assert isinstance(text, str), type(text)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    *,
    thinking: bool | None = None,
) -> list[int]:
    """Return the tokens that a server would pass to the model for this chat."""
    return encode(tokenizer, render(tokenizer, messages, ask=True, thinking=thinking))


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Example:
    """Return the whole chat, with the assistant's answers in the mask."""
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
    return make_example(ids, mask)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def collate(examples: Sequence[Example], *, pad_id: int, multiple: int = 1) -> Batch:
    """Right-pad to the longest example, rounded up to a multiple of `multiple` tokens."""
    lens = torch.tensor([len(e.token_ids) for e in examples])
    size = round_up(int(lens.max()), multiple)
    ids = torch.full((len(examples), size), pad_id)
    mask = torch.zeros((len(examples), size), dtype=torch.bool)
    for row, example in enumerate(examples):
        n = len(example.token_ids)
        ids[row, :n] = torch.frombuffer(example.token_ids, dtype=torch.int32)
        mask[row, :n] = torch.frombuffer(example.answer_mask, dtype=torch.bool)
    return Batch(ids, mask, lens)


class Batches(Iterator[Batch]):
    """An endless stream of shuffled batches, bucketed by length to save padding.

    The order depends only on the seed and the epoch, so `seek` resumes the order of another run.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        tokens_per_batch: int,
        pad_id: int,
        seed: int,
        rows_per_batch: int | None = None,
        multiple: int = 1,
    ) -> None:
        self.examples, self.seed = examples, seed
        self.tokens_per_batch, self.rows_per_batch = tokens_per_batch, rows_per_batch
        self.pad_id, self.multiple = pad_id, multiple
        self.seek(0, 0)

    def seek(self, epoch: int, index: int) -> None:
        """Make batch `index` of `epoch` the next one."""
        self.epoch, self.index = epoch, index
        self.groups = self._group(Random(f"{self.seed}-{epoch}"))

    def __next__(self) -> Batch:
        if self.index == len(self.groups):
            self.seek(self.epoch + 1, 0)
        self.index += 1
        group = [self.examples[i] for i in self.groups[self.index - 1]]
        return collate(group, pad_id=self.pad_id, multiple=self.multiple)

    def _group(self, rng: Random) -> list[list[int]]:
        sizes = [len(e.token_ids) for e in self.examples]
        # jitter the lengths, or the same examples would share a batch in every epoch
        noisy = [n * rng.uniform(0.9, 1.1) for n in sizes]
        lens = [round_up(n, self.multiple) for n in sizes]
        groups: list[list[int]] = [[]]
        longest = 0
        for i in sorted(range(len(lens)), key=noisy.__getitem__):
            longest = max(longest, lens[i])
            rows = len(groups[-1])
            full = longest * (rows + 1) > self.tokens_per_batch or rows == self.rows_per_batch
            if rows and full:
                groups.append([])
                longest = lens[i]
            groups[-1].append(i)
        rng.shuffle(groups)
        return groups
