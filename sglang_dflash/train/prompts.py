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
ROOM = 16


@dataclass(frozen=True)
class PromptFile:
    name: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class Chat:
    """Messages that end with a user turn, and further user turns, each to be asked after the
    target's answer to the one before."""

    messages: list[dict[str, str]]
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompts:
    token_ids: dict[str, list[int]]  # by key, sorted by key
    talks: dict[str, Chat]  # by key: those with later turns
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
    talks: dict[str, Chat] = {}
    files, too_long, repeated = [], 0, 0
    for path in paths:
        rows = 0
        for chat in read_chats(path):
            rows += 1
            place = f"{path}, prompt {rows}"
            ids = encode_chat_so_far(tokenizer, chat.messages, thinking=thinking, place=place)
            key = key_of(ids)
            if len(ids) + ROOM > max_length:
                too_long += 1
            elif key in found:
                repeated += 1
            else:
                found[key] = ids
                if chat.later:
                    talks[key] = chat
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
    return Prompts(dict(sorted(found.items())), talks, files, too_long, repeated)


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


def encode_chat_so_far(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    *,
    thinking: bool | None,
    place: str,
) -> list[int]:
    """Return the tokens of a prompt; raise ValueError if the template cannot format it."""
    try:
        return encode_prompt(tokenizer, messages, thinking=thinking)
    # a template is a program of the target's: it raises what it likes
    except Exception as error:
        raise ValueError(
            f"{place}: the chat template of {tokenizer.name_or_path} cannot format it ({error}). "
            "Remove or change this prompt."
        ) from error


def read_messages(path: Path) -> Iterator[list[dict[str, str]]]:
    """Yield the chats of one file as far as its first user turn that needs an answer."""
    return (chat.messages for chat in read_chats(path))


def read_chats(path: Path) -> Iterator[Chat]:
    """Yield the chats of one file."""
    if not path.is_file():
        raise ValueError(f"--prompts names {path}, which is not a file.")
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield Chat([_user(line.strip())])
        else:
            yield _read_row(line, f"{path}, line {number}")


def _read_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        try:
            yield from lines
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--prompts names {path}, which is not UTF-8 text ({error}). Write one prompt per "
                "line into it: JSON with `prompt`, `messages` or `turns`, or text in a .txt."
            ) from None


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _read_row(line: str, place: str) -> Chat:
    wanted = (
        "Each line needs `prompt` (a string), `messages` (a list of role and content) or `turns` "
        "(the user's turns, as strings); `later` may add turns to the first two."
    )
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}). {wanted}") from None
    found = sorted(row) if isinstance(row, dict) else type(row).__name__
    refused = ValueError(f"{place} has {found}. {wanted}")
    if not isinstance(row, dict):
        raise refused
    later = row.get("later", [])
    if not _are_texts(later):
        raise refused
    if isinstance(row.get("prompt"), str):
        return Chat([_user(row["prompt"])], tuple(later))
    turns = row.get("turns")
    if turns and _are_texts(turns):
        first, *others = turns
        return Chat([_user(first)], (*others, *later))
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and "role" in m and isinstance(m.get("content"), str) for m in messages
    ):
        raise refused
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{place} has no user turn. {wanted}")
    return Chat(messages, tuple(later))


def _are_texts(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(text, str) for text in found)
