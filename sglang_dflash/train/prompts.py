"""Prompt files, and the held-out split.

A prompt's key is a hash of its tokens. Prompts are sorted by key, which shuffles them, and the
first ones are held out: the same in every run, independent of how files are ordered or split.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dflash.train.batches import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# room for an answer, in tokens: shorter ones are not worth training on
_ROOM = 16


@dataclass(frozen=True)
class PromptFile:
    name: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class Prompts:
    token_ids: dict[str, list[int]]  # by key, sorted by key
    files: list[PromptFile]
    too_long: int
    repeated: int


def key_of(token_ids: Sequence[int]) -> str:
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=8).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_prompts(
    paths: Sequence[Path],
    *,
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None,
    max_length: int,
) -> Prompts:
    """Return the distinct prompts that leave room for an answer."""
    check_template(tokenizer, thinking)
    found: dict[str, list[int]] = {}
    files, too_long, repeated = [], 0, 0
    for path in paths:
        rows = 0
        for messages in read_messages(path):
            rows += 1
            ids = _encode(tokenizer, messages, thinking=thinking, place=f"{path}, prompt {rows}")
            key = key_of(ids)
            too_long += len(ids) + _ROOM > max_length
            repeated += key in found
            if len(ids) + _ROOM <= max_length:
                found[key] = ids
        if not rows:
            raise ValueError(
                f"--prompts names {path}, which is empty. Write one prompt per line into it: JSON "
                "with `prompt` or `messages`, or text in a .txt."
            )
        files.append(PromptFile(path.name, rows, sha256(path)))
    if not found:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no prompt to answer ({too_long} are longer than "
            f"--max-length {max_length} allows). Pass more prompts or raise --max-length."
        )
    return Prompts(dict(sorted(found.items())), files, too_long, repeated)


def check_template(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> None:
    """Raise ValueError without a chat template, or if it does not support `thinking`."""
    template = tokenizer.chat_template
    if not template:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path} has no chat template, so prompts cannot "
            "be formatted as a server would format them. Use an instruction-tuned target, or add "
            "a chat_template to its tokenizer_config.json."
        )
    if thinking is not None and "enable_thinking" not in str(template):
        raise ValueError(
            f"--thinking {'on' if thinking else 'off'} was asked for, but the chat template of "
            f"{tokenizer.name_or_path} does not use enable_thinking. Leave --thinking at default."
        )


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    *,
    thinking: bool | None,
    place: str,
) -> list[int]:
    try:
        return encode_prompt(tokenizer, messages, thinking=thinking)
    # a template is a program of the target's: it raises what it likes
    except Exception as error:
        raise ValueError(
            f"{place}: the chat template of {tokenizer.name_or_path} cannot format it ({error}). "
            "Remove or change this prompt."
        ) from error


def read_messages(path: Path) -> Iterator[list[dict[str, str]]]:
    """Yield the chats of one file, each ending with a user turn."""
    if not path.is_file():
        raise ValueError(f"--prompts names {path}, which is not a file.")
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield [{"role": "user", "content": line.strip()}]
        else:
            yield _read_row(line, f"{path}, line {number}")


def _read_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        try:
            yield from lines
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--prompts names {path}, which is not UTF-8 text ({error}). Write one prompt per "
                "line into it: JSON with `prompt` or `messages`, or text in a .txt."
            ) from None


def _read_row(line: str, place: str) -> list[dict[str, str]]:
    wanted = "Each line needs `prompt` (a string) or `messages` (a list of role and content)."
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}). {wanted}") from None
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and "role" in m and isinstance(m.get("content"), str) for m in messages
    ):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{place} has {found}. {wanted}")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{place} has no user turn. {wanted}")
    return messages
