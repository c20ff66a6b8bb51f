"""Gemma 4 as users see it: the OpenAI API, the real tokenizer and chat template, thinking, tools,
multiple turns, images. DFLASH answers like plain decoding, and plain decoding gives the answers
the tiny model has learned.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Gemma4ForConditionalGeneration,
    PreTrainedTokenizerBase,
)

from sglang_dflash.reference import Drafter, generate
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import SCRIPTED, start_together
from tests.gemma4_chat import BLOCK, Conversation, make_chat_pair
from tests.gemma4_tokenizer import Unavailable, gemma4_tokenizer

ARGS = ("--reasoning-parser", "gemma4", "--tool-call-parser", "gemma4", "--enable-cache-report")
ARGS += ("--context-length", "1024", "--max-total-tokens", "8192", "--chunked-prefill-size", "256")
THINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
# with thinking on, SGLang's parser treats an answer without a thought as the thought
UNPARSED = {"extra_body": {**THINKING["extra_body"], "separate_reasoning": False}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of the next days in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "days": {"type": "integer", "description": "How many days"},
            },
            "required": ["city", "days"],
        },
    },
}
TOOLS = {"tools": [WEATHER], "tool_choice": "auto"}
REQUIRED = {"tools": [WEATHER], "tool_choice": "required"}
TEACHER = {"role": "system", "content": "You are a patient teacher of physics."}


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def weather(city: str, days: int) -> tuple[str, dict[str, Any]]:
    return "get_weather", {"city": city, "days": days}


BLUE = "Air scatters blue light far more than red light, so blue reaches us from everywhere."
RED = "At sunset the light has lost its blue on a longer way through the air."
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'},
        }
    ],
}
CALL_TEXT = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
FIRST_CALL = [said("user", "Will it rain in Paris in the next three days?")]
FIRST_TURN = [TEACHER, said("user", "Why is the sky blue?")]
CONVERSATIONS = {
    "system prompt": Conversation(FIRST_TURN, BLUE),
    "second turn": Conversation(
        [*FIRST_TURN, said("assistant", BLUE), said("user", "And red at sunset?")], RED
    ),
    "thinking": Conversation(
        [said("user", "Is 91 a prime number?")],
        "<|channel>thought\nTry small factors. 7 times 13 is 91.<channel|>No, 91 is 7 times 13.",
        THINKING,
    ),
    "thinking off": Conversation([said("user", "Is 91 a prime number?")], "It is not."),
    "tool": Conversation(
        [said("user", "Is it warm in Oslo today?")],
        'Let me see.<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:1}<tool_call|>',
        TOOLS,
    ),
    "tools not needed": Conversation(
        [said("user", "What is rain?")], "Rain is water that falls from clouds.", TOOLS
    ),
    "thinking, then two tools": Conversation(
        [said("user", "Compare Oslo with Rome tomorrow.")],
        "<|channel>thought\nTwo cities, one day each.<channel|>I ask for both."
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:1}<tool_call|>'
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:1}<tool_call|>',
        TOOLS | THINKING,
    ),
    "tool at once": Conversation(FIRST_CALL, CALL_TEXT, TOOLS | UNPARSED),
    "after the tool": Conversation(
        [
            *FIRST_CALL,
            CALL,
            {"role": "tool", "tool_call_id": "call_0", "content": "dry, 21 degrees"},
        ],
        "No, it stays dry in Paris at 21 degrees.",
        TOOLS | UNPARSED,
    ),
    "required tool": Conversation(
        [said("user", "Madrid, a week.")],
        '[{"name": "get_weather", "parameters": {"city": "Madrid", "days": 7}}]',
        REQUIRED,
    ),
    "thinking, then a required tool": Conversation(
        [said("user", "Lisbon, two days.")],
        "<|channel>thought\nA city and a number.<channel|>"
        '[{"name": "get_weather", "parameters": {"city": "Lisbon", "days": 2}}]',
        REQUIRED | THINKING,
    ),
}
# name -> (reasoning, content, calls, finish reason), as the API should report them
EXPECTED: dict[str, tuple[str | None, str | None, list[tuple[str, dict[str, Any]]], str]] = {
    "system prompt": (None, BLUE, [], "stop"),
    "second turn": (None, RED, [], "stop"),
    "thinking": ("Try small factors. 7 times 13 is 91.", "No, 91 is 7 times 13.", [], "stop"),
    "thinking off": (None, "It is not.", [], "stop"),
    "tool": (None, "Let me see.", [weather("Oslo", 1)], "tool_calls"),
    "tools not needed": (None, "Rain is water that falls from clouds.", [], "stop"),
    "thinking, then two tools": (
        "Two cities, one day each.",
        "I ask for both.",
        [weather("Oslo", 1), weather("Rome", 1)],
        "tool_calls",
    ),
    "tool at once": (None, None, [weather("Paris", 3)], "tool_calls"),
    "after the tool": (None, "No, it stays dry in Paris at 21 degrees.", [], "stop"),
    "required tool": (None, None, [weather("Madrid", 7)], "tool_calls"),
    "thinking, then a required tool": (
        "A city and a number.",
        None,
        [weather("Lisbon", 2)],
        "tool_calls",
    ),
}
COUNTER = itertools.count()


class Chat:
    """The target with and without speculation, and the tokenizer both should use."""

    def __init__(self, tokenizer_folder: Path, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer_folder)
        self.folder = folder
        pairs = list(CONVERSATIONS.values())
        target, drafter = make_chat_pair(folder, tokenizer_folder, pairs)
        sequences = [c.prompt_ids(self.tokenizer) + c.answer_ids(self.tokenizer) for c in pairs]
        (folder / "answers.json").write_text(json.dumps(sequences))
        common = ("--model-path", str(target), *ARGS)
        self.plain, self.dflash = start_together(
            Server(*common, plain=True),
            Server(
                *common,
                "--speculative-draft-model-path",
                str(drafter),
                env={
                    "PYTHONPATH": SCRIPTED,
                    "SCRIPT_FOLDER": str(folder),
                    "SGLANG_DFLASH_WIDTH": str(BLOCK),
                },
            ),
        )

        self.answers: dict[tuple[str, bool], Answer] = {}

    def plainly(self, name: str, *, stream: bool = False) -> Answer:
        """Return plain decoding's answer."""
        if (name, stream) not in self.answers:
            chosen = CONVERSATIONS[name]
            answer = ask(self.plain, chosen.messages, chosen.request, stream=stream)
            self.answers[name, stream] = answer
        return self.answers[name, stream]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    try:
        tokenizer_folder = gemma4_tokenizer()
    except Unavailable as error:
        pytest.skip(f"no Gemma 4 tokenizer: {error}")
    chat = Chat(tokenizer_folder, tmp_path_factory.mktemp("gemma-chat"))
    yield chat
    chat.plain.stop()
    chat.dflash.stop()


@dataclass(frozen=True)
class Answer:
    """Fields that must not depend on speculation, and one that depends on earlier requests."""

    reasoning: str | None
    content: str | None
    calls: list[tuple[str, str]]  # name, arguments
    finish: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = field(compare=False)


def ask(
    server: Server,
    messages: list[dict[str, Any]],
    request: dict[str, Any],
    *,
    stream: bool = False,
    drafter: str = "real",
) -> Answer:
    extra = {**request.get("extra_body", {}), "rid": f"{drafter}-{next(COUNTER)}"}
    options = {"model": "m", "temperature": 0, "max_tokens": 80, **request, "extra_body": extra}
    create = server.client.chat.completions.create
    if stream:
        usage = {"include_usage": True}
        return joined(create(messages=messages, stream=True, stream_options=usage, **options))
    answer = create(messages=messages, **options)
    [choice] = answer.choices
    calls = choice.message.tool_calls or []
    return Answer(
        getattr(choice.message, "reasoning_content", None) or None,
        choice.message.content or None,
        [(call.function.name, call.function.arguments) for call in calls],
        choice.finish_reason,
        **counts(answer.usage),
    )


def joined(chunks: Any) -> Answer:
    """Assemble a streamed answer."""
    reasoning, content, finish, usage = "", "", None, None
    calls: dict[int, tuple[str, str]] = {}
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                name, arguments = calls.get(call.index, ("", ""))
                name += call.function.name or ""
                calls[call.index] = name, arguments + (call.function.arguments or "")
    in_order = [calls[index] for index in sorted(calls)]
    return Answer(reasoning or None, content or None, in_order, finish, **counts(usage))


def counts(usage: Any) -> dict[str, int]:
    details = usage.prompt_tokens_details
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": details.cached_tokens if details else 0,
    }


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_plain_decoding_gives_the_learned_answer(chat: Chat, name: str) -> None:
    """Otherwise the comparisons below would cover neither thoughts nor tool calls."""
    conversation = CONVERSATIONS[name]
    found = chat.plainly(name)
    calls = [(function, json.loads(arguments)) for function, arguments in found.calls]
    assert (found.reasoning, found.content, calls, found.finish) == EXPECTED[name]
    # the server has applied the chat template exactly once
    assert found.prompt_tokens == len(conversation.prompt_ids(chat.tokenizer))


@pytest.mark.parametrize(
    ("drafter", "stream"),
    [("right2", False), ("right7", True)],
    ids=["two right", "all right, streamed"],
)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_dflash_answers_as_plain_decoding(
    chat: Chat, name: str, drafter: str, stream: bool
) -> None:
    """Special tokens, end-of-turn tokens and grammar starts may be anywhere in a block."""
    chosen = CONVERSATIONS[name]
    found = ask(chat.dflash, chosen.messages, chosen.request, stream=stream, drafter=drafter)
    assert found == chat.plainly(name, stream=stream)


def test_blocks_hold_thoughts_and_calls(chat: Chat) -> None:
    """With correct drafts an answer takes one step per block, special tokens or not."""
    conversation = CONVERSATIONS["thinking, then two tools"]
    request = {**conversation.request}
    request["extra_body"] = {**request["extra_body"], "return_meta_info": True, "rid": "right7-m"}
    answer = chat.dflash.client.chat.completions.create(
        model="m", messages=conversation.messages, temperature=0, max_tokens=80, **request
    )
    num_tokens = len(conversation.answer_ids(chat.tokenizer))
    steps = answer.choices[0].meta_info["dflash"]["verify_steps"]
    # prefill gives the first token
    assert steps == -(-(num_tokens - 1) // BLOCK)


@pytest.mark.parametrize("drafter", ["real", "right7"])
def test_next_turn_finds_the_last_one_in_the_cache(chat: Chat, drafter: str) -> None:
    """Committed rows are in the prefix cache as plain decoding would have left them."""
    first, second = CONVERSATIONS["tool at once"], CONVERSATIONS["after the tool"]
    answers, cached = [], []
    for server in (chat.plain, chat.dflash):
        server.flush_cache()
        turns = [ask(server, c.messages, c.request, drafter=drafter) for c in (first, second)]
        answers.append(turns)
        cached.append([turn.cached_tokens for turn in turns])
    assert answers[1] == answers[0]
    # an end-of-turn token inside a block has KV, which plain decoding never computes
    assert cached[1][1] - cached[0][1] in (0, 1)
    # the template reproduces the call verbatim, so its tokens hit the cache, too
    opening = answers[0][0]
    assert cached[0][1] > opening.prompt_tokens + opening.completion_tokens // 2


def test_drafter_reads_the_whole_model_as_the_oracle_does(chat: Chat) -> None:
    """Features, embedding and head are nested deeper than in a text-only model."""
    prompt = CONVERSATIONS["thinking"].prompt_ids(chat.tokenizer)
    target = Gemma4ForConditionalGeneration.from_pretrained(
        chat.folder / "target", dtype=torch.float32
    )
    oracle = generate(
        target.eval(),
        Drafter.from_pretrained(chat.folder / "drafter", dtype=torch.float32).eval(),
        prompt,
        max_new_tokens=20,
        eos_token_ids=(),
        block_size=BLOCK,
    )
    served = chat.dflash.generate(prompt, rid="record-0", max_new_tokens=20, ignore_eos=True)
    assert served["output_ids"] == oracle.token_ids
    lines = (chat.folder / "blocks.jsonl").read_text().splitlines()[: len(oracle.blocks)]
    blocks = [json.loads(line) for line in lines]
    assert [(b["start"], tuple(b["drafts"])) for b in blocks] == [
        (b.start, b.token_ids[1:]) for b in oracle.blocks
    ]


def picture(color: tuple[int, int, int]) -> dict[str, Any]:
    image = Image.linear_gradient("L").resize((96, 64)).convert("RGB")
    image.paste(color, (0, 0, 40, 40))
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_images(chat: Chat) -> None:
    """Image rows have features too, and the drafter's context includes them."""
    answers = []
    for color in ((230, 20, 20), (10, 200, 90)):
        question = [picture(color), {"type": "text", "text": "Why is the sky blue?"}]
        messages = [{"role": "user", "content": question}]
        answers.append(ask(chat.plain, messages, {}))
        assert ask(chat.dflash, messages, {}) == answers[-1]
        assert answers[-1].prompt_tokens > 200
    assert answers[0] != answers[1]


NO_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a required tool, and none given": (FIRST_TURN, {"tools": [], "tool_choice": "required"}),
    "no image": ([{"role": "user", "content": [NO_IMAGE]}], {}),
    "longer than the context": ([said("user", "word " * 1200)], {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_plain_decoding_refuses_is_refused_alike(chat: Chat, name: str) -> None:
    messages, request = REFUSED[name]
    errors = []
    for server in (chat.plain, chat.dflash):
        with pytest.raises(openai.APIStatusError) as raised:
            ask(server, messages, request)
        # it may contain the address of an object
        message = re.sub("0x[0-9a-f]+", "0x", raised.value.message)
        errors.append((raised.value.status_code, message))
    assert errors[1] == errors[0]
    assert errors[0][0] == 400
