"""Stream an answer, distinguishing accepted drafts from the target's own tokens.

A verify step sends its committed tokens as one chunk: accepted drafts, then one token of the
target, which a stop may cut off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import requests

GREEN, PLAIN = "\033[32m", "\033[0m"


@dataclass(frozen=True)
class Piece:
    text: str
    accepted: bool  # an accepted draft; otherwise the target's own


@dataclass
class Answer:
    """One answer. Each chunk after the first is a verify step, unless several were merged."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    chunks: int = 0
    verify_steps: int = 0

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_split_exactly(self) -> bool:
        return self.chunks == self.verify_steps + 1


def stream_pieces(
    url: str,
    tokenizer: Any,
    messages: list[dict[str, str]],
    *,
    max_tokens: int,
    answer: Answer,
    drafting: bool = True,
) -> Iterator[Piece]:
    """Stream the pieces of a greedy answer, updating `answer`; from a server without our DFLASH
    with `drafting=False`."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens},
        "stream": True,
    }
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                continue
            chunk = json.loads(line[5:])
            output_ids = chunk["output_ids"]
            acceptance = chunk["meta_info"].get("dflash")
            own = len(output_ids) - 1 if drafting else 0
            if acceptance is not None:
                answer.verify_steps = acceptance["verify_steps"]
                # cut off by a stop: the target's own tokens are prefill's and one per earlier step
                if own == acceptance["accepted_tokens"] + answer.verify_steps - 1:
                    own += 1
            if len(output_ids) > answer.tokens:
                answer.chunks += 1
            for position in range(answer.tokens, len(output_ids)):
                # a token may be part of a character: decode the whole prefix to see what it added
                text = tokenizer.decode(output_ids[: position + 1], skip_special_tokens=True)
                if text.endswith("\N{REPLACEMENT CHARACTER}"):
                    continue
                added, answer.text = text[len(answer.text) :], text
                yield Piece(added, accepted=position < own)
            answer.token_ids = output_ids


def show(pieces: Iterator[Piece], *, colour: bool | None = None) -> None:
    """Print accepted drafts in green, or in brackets without a terminal."""
    colour = sys.stdout.isatty() if colour is None else colour
    begin, end = (GREEN, PLAIN) if colour else ("⟦", "⟧")
    inside = False
    for piece in pieces:
        if piece.text and piece.accepted != inside:
            print(begin if piece.accepted else end, end="")
            inside = piece.accepted
        print(piece.text, end="", flush=True)
    print(end if inside else "")
