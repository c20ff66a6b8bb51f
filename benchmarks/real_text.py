"""Questions from files, as the token ids that a chat with the model begins with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import result_files


def read_prompts(paths: Iterable[Path]) -> list[str]:
    """Return the first question of each line, in a fixed shuffled order; exit if a file of
    --prompts has none."""
    found = []
    for path in paths:
        rows = result_files.read_lines(path, "--prompts")
        asked = [question_of(row) for row in rows]
        if None in asked or not asked:
            which = f"its object {asked.index(None) + 1}" if asked else "it"
            raise SystemExit(
                f"--prompts {path}: {which} has no question. Each line is an object with `turns`, "
                "`prompt` or `question`."
            )
        found += [question for question in asked if question]
    random.Random(0).shuffle(found)
    return found


def question_of(row: dict[str, Any]) -> str | None:
    """Return the first question of a line; None without one."""
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    known = (first, row.get("prompt"), row.get("question"))
    return next((each for each in known if isinstance(each, str) and each), None)


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
