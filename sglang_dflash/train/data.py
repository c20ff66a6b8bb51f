"""Prompts, conversations and the tokenizer of the tiny pair. Needs no torch.

A prompt belongs to one split for ever, by a hash of its text: the same rule serves training,
evaluation, tests and demonstrations, so a held-out prompt cannot leak into training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal

from sglang_dflash.train.exchange import Exchange
from sglang_dflash.train.grammar import KINDS
from sglang_dflash.train.world import SYSTEMS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held_out"]

# one prompt in ten
_HELD_OUT_BUCKETS = 10

VOCAB_SIZE = 1024
PAD, START, END, MASK = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"

# each turn is one line of roles, its text and the end marker; no system turn is made up
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def split_of(prompt: str) -> Split:
    """Return the split that owns this prompt."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest, "big") % _HELD_OUT_BUCKETS == 0 else "train"


def draw_exchanges(*, seed: int, split: Split) -> Iterator[Exchange]:
    """Yield exchanges of one split for ever; the same seed gives the same stream."""
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
        """Return the chat in the form that chat templates take."""
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


def make_tokenizer(folder: Path, *, texts: list[str]) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE of exactly VOCAB_SIZE entries and save it to `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    raw = Tokenizer(models.BPE())
    # words and single digits keep their leading space, so that "12" is two tokens, never one
    words = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    if raw.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"The corpus gave {raw.get_vocab_size()} tokens but {VOCAB_SIZE} are needed. "
            "Pass more varied texts."
        )
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    # written by hand: the key names that every transformers release since 4.40 reads
    settings = {
        "additional_special_tokens": [START],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "mask_token": MASK,
        "model_max_length": 2048,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(folder)
