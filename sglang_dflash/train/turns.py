"""Later turns of a talk: questions that follow the target's own answers to the turns before.

A talk goes on until its turns are asked, an answer does not end by itself, or no room is left. The
answer to turn T of the talk that begins with answer PROMPT.N has the key PROMPT.N.T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from sglang_dflash.train.answers import Answer, Question
from sglang_dflash.train.prompts import ROOM, Chat, encode_chat_so_far


def prompt_key(key: str) -> str:
    """Return the prompt's part of an answer's key."""
    return key.partition(".")[0]


def is_later(key: str) -> bool:
    """Return whether an answer is one to a later turn."""
    return key.count(".") > 1


@dataclass
class Turn:
    """The questions of one turn, and how many talks ended before it."""

    questions: list[Question] = field(default_factory=list)
    unfinished: int = 0
    too_long: int = 0


@dataclass(frozen=True, kw_only=True)
class Talks:
    """The talks of a run, and how they are formatted."""

    chats: Mapping[str, Chat]  # by prompt
    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None
    max_new_tokens: int
    max_length: int

    @property
    def most_turns(self) -> int:
        return max((len(chat.later) for chat in self.chats.values()), default=0)

    def ask_turn(
        self, number: int, first: Sequence[Question], answers: Mapping[str, Answer]
    ) -> Turn:
        """Return the questions of a later turn, 1 or more, of the talks that begin with these
        questions, as far as the turns before are answered."""
        turn = Turn()
        for question in first:
            chat = self.chats.get(prompt_key(question.key))
            if chat is None or number > len(chat.later):
                continue
            keys = [question.key, *(f"{question.key}.{n}" for n in range(1, number))]
            before = [answers[key] for key in keys if key in answers]
            if len(before) < number:
                continue
            if before[-1].finish != "stop":
                turn.unfinished += 1
                continue
            ids = self._encode(chat, before)
            if len(ids) + ROOM > self.max_length:
                turn.too_long += 1
                continue
            room = min(self.max_new_tokens, self.max_length - len(ids))
            key = f"{question.key}.{number}"
            turn.questions.append(Question(key, ids, question.temperature, room))
        return turn

    def _encode(self, chat: Chat, answers: Sequence[Answer]) -> list[int]:
        messages = list(chat.messages)
        for answer, text in zip(answers, chat.later, strict=False):
            said = str(self.tokenizer.decode(answer.answer_ids.tolist(), skip_special_tokens=True))
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": text})
        place = f"the talk that begins with {chat.messages[-1]['content'][:60]!r}"
        return encode_chat_so_far(self.tokenizer, messages, thinking=self.thinking, place=place)
