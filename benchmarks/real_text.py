"""Questions from files, as the token ids that a chat with the model begins with."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path


def read_prompts(paths: Iterable[Path]) -> list[str]:
    """Return the first question of each line, in a fixed shuffled order."""
    lines = [line for path in paths for line in path.read_text().splitlines() if line.strip()]
    rows = [json.loads(line) for line in lines]
    found = [
        (row.get("turns") or [None])[0] or row.get("prompt") or row["question"] for row in rows
    ]
    random.Random(0).shuffle(found)
    return found


def to_ids(model_path: str, prompts: Sequence[str]) -> list[list[int]]:
    """Return the prompts as token ids, as chats if the model has a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=True)
    if tokenizer.chat_template is None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
