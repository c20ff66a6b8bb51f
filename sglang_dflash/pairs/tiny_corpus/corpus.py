"""Prompts and conversations of the tiny pair, by split. Needs no torch.

A hash of its text assigns every prompt to the train or the held-out split. Training, evaluation,
tests and demos use this one rule, so a held-out prompt cannot leak into training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from sglang_dflash.pairs.tiny_corpus.exchange import Exchange
from sglang_dflash.pairs.tiny_corpus.tables import SYSTEMS
from sglang_dflash.pairs.tiny_corpus.templates import KINDS

Split = Literal["train", "held_out"]

# one prompt in ten
_HELD_OUT_BUCKETS = 10


def split_of(prompt: str) -> Split:
    """Return the split of this prompt."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest, "big") % _HELD_OUT_BUCKETS == 0 else "train"


def draw_exchanges(*, seed: int, split: Split) -> Iterator[Exchange]:
    """Yield an endless stream of exchanges of one split, deterministic in the seed."""
    rng = Random(f"{split}-{seed}")
    kinds, weights = list(KINDS), list(KINDS.values())
    while True:
        exchange = rng.choices(kinds, weights)[0](rng)
        if split_of(exchange.prompt) == split:
            yield exchange


def sample_prompts(n: int, *, seed: int, split: Split = "held_out") -> list[str]:
    """Return `n` distinct prompts of one split, in the order they were drawn."""
    found: dict[str, None] = {}
    for exchange in draw_exchanges(seed=seed, split=split):
        if len(found) == n:
            break
        found[exchange.prompt] = None
    return list(found)


@dataclass(frozen=True)
class Conversation:
    system: str | None
    turns: tuple[Exchange, ...]

    def messages(self) -> list[dict[str, str]]:
        """Return the chat as messages for a chat template."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for prompt, answer in self.turns:
            found.append({"role": "user", "content": prompt})
            found.append({"role": "assistant", "content": answer})
        return found


def make_conversations(n: int, *, seed: int, split: Split = "train") -> list[Conversation]:
    """Return `n` chats: mostly one turn, some of two or three, some with a system message."""
    rng = Random(f"conversations-{split}-{seed}")
    stream = draw_exchanges(seed=seed, split=split)
    found = []
    for _ in range(n):
        turns = rng.choices((1, 2, 3), weights=(75, 17, 8))[0]
        system = rng.choice(SYSTEMS) if rng.random() < 0.15 else None
        found.append(Conversation(system, tuple(next(stream) for _ in range(turns))))
    return found
