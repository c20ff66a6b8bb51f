"""Every sampling parameter, alone and combined, token for token against plain decoding.

Seeded or greedy, on a real server. Each case also checks that its parameter changes answers, or a
server that ignores it would pass.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from tokenizers import Tokenizer

from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.server import SCHEDULES, Server
from tests.e2e.conftest import SCRIPTED, SHAPE
from tests.schedules import follows

# to save time; `pytest --schedules "in turn,overlap,plan stream"` runs every test under each
pytestmark = pytest.mark.usual_schedule("plan stream")

NUM_PROMPTS = 20
NEW_TOKENS = 28
# noise = f(seed, position): SGLang honours seeds in deterministic mode only
SEEDED = (*SHAPE, "--enable-deterministic-inference", "--enable-custom-logit-processor")
SEEDED += ("--tool-call-parser", "qwen25")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

_WORDS = Tokenizer.from_file(f"{tiny_target()}/tokenizer.json")
# tokens that occur in most answers
COMMON = [_WORDS.encode(text).ids[0] for text in (".", ",", " the", " is", " a")]
LOGIT_BIAS = {str(token): -12.0 for token in COMMON} | {"300": 4.0}

GREEDY = {"temperature": 0.0}
HOT = {"temperature": 1.5, "sampling_seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "temperature 0": GREEDY,
    "temperature 0.7": {"temperature": 0.7, "sampling_seed": 5},
    "temperature 1": {"temperature": 1.0, "sampling_seed": 5},
    "temperature 1.5": HOT,
    "another seed": HOT | {"sampling_seed": 2**40 + 3},
    "top_k": HOT | {"top_k": 8},
    "top_p": HOT | {"top_p": 0.9},
    "top_k and top_p": HOT | {"top_k": 8, "top_p": 0.8},
    "frequency_penalty": GREEDY | {"frequency_penalty": 2.0},
    "negative frequency_penalty": GREEDY | {"frequency_penalty": -1.5},
    "presence_penalty": GREEDY | {"presence_penalty": 2.0},
    "repetition_penalty": GREEDY | {"repetition_penalty": 1.9},
    "all penalties": GREEDY
    | {"repetition_penalty": 1.5, "frequency_penalty": 1.5, "presence_penalty": 1.0},
    "all penalties, sampled": HOT
    | {"repetition_penalty": 1.5, "frequency_penalty": 1.5, "presence_penalty": 1.0, "top_k": 20},
    "min_new_tokens": GREEDY | {"min_new_tokens": 25},
    "min_new_tokens and penalty": HOT | {"min_new_tokens": 20, "presence_penalty": 1.0},
    "logit_bias": GREEDY | {"logit_bias": LOGIT_BIAS},
    "logit_bias, sampled": HOT | {"logit_bias": LOGIT_BIAS},
    "regex": GREEDY | {"regex": "[a-zA-Z ]{12,40}\\."},
    "regex, sampled": HOT | {"regex": "[a-zA-Z ]{12,40}\\.", "top_p": 0.95},
    "json_schema": GREEDY | {"json_schema": json.dumps(SCHEMA)},
    "json_schema, sampled": HOT | {"json_schema": json.dumps(SCHEMA), "top_k": 12},
    "ebnf": GREEDY | {"ebnf": 'root ::= ("yes" | "no" | "perhaps") " " [a-z]{3,20} "."'},
    "grammar and penalty": GREEDY | {"regex": "([a-z]+ ){6,9}[a-z]+", "frequency_penalty": 1.0},
    "stop_token_ids": HOT | {"stop_token_ids": COMMON},
    "ignore_eos": HOT | {"ignore_eos": True},
}
# cases that may leave the answers to these prompts unchanged
NEUTRAL = {"temperature 0"}


@pytest.fixture(scope="module")
def control() -> Iterator[Server]:
    """Plain decoding."""
    with Server(*SEEDED, plain=True, env={"PYTHONPATH": SCRIPTED}) as server:
        yield server


@pytest.fixture(scope="session")
def drafted(schedule: str) -> Iterator[Server]:
    """The same target with its drafter."""
    env = {"PYTHONPATH": SCRIPTED, **SCHEDULES[schedule]}
    with Server(*SEEDED, env=env) as server:
        assert follows(server, schedule)
        yield server


@pytest.fixture
def seeded(control: Server, drafted: Server) -> tuple[Server, Server]:
    return control, drafted


def ask(server: Server, prompts: list[list[int]], body: dict[str, Any]) -> list[dict[str, Any]]:
    """Send all prompts, eight at a time; `body` may hold more than sampling parameters."""
    params = {"max_new_tokens": NEW_TOKENS, **body.get("sampling_params", {})}

    def one(ids: list[int]) -> dict[str, Any]:
        response = requests.post(
            f"{server.url}/generate",
            json={**body, "input_ids": ids, "sampling_params": params},
            timeout=300,
        )
        assert response.ok, response.text
        return response.json()

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, prompts))


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def expected_of(control: Server, prompts: list[list[int]]) -> Callable[[str], list[list[int]]]:
    """Plain decoding's answers to a case, cached."""

    @functools.cache
    def answers(name: str) -> list[list[int]]:
        return tokens(ask(control, prompts[:NUM_PROMPTS], {"sampling_params": CASES[name]}))

    return answers


@pytest.fixture(scope="module")
def greedy(expected_of: Callable[[str], list[list[int]]]) -> list[list[int]]:
    return expected_of("temperature 0")


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_plain_decoding(
    drafted: Server,
    prompts: list[list[int]],
    greedy: list[list[int]],
    expected_of: Callable[[str], list[list[int]]],
    name: str,
) -> None:
    expected = expected_of(name)
    found = tokens(ask(drafted, prompts[:NUM_PROMPTS], {"sampling_params": CASES[name]}))
    assert found == expected
    if name not in NEUTRAL:
        changed = sum(a != b for a, b in zip(expected, greedy, strict=True))
        assert changed >= 2, f"{name} changes {changed} answers: the test would not see it ignored"


def test_different_requests_in_one_batch_do_not_mix(
    seeded: tuple[Server, Server], prompts: list[list[int]]
) -> None:
    """Eight at a time with different parameters: each row must use those of its own request.

    All filtered: next to a filtered request, SGLang samples an unfiltered one with other noise.
    """
    filtered = [{"top_k": 30} | case if case["temperature"] else case for case in CASES.values()]
    mixed = list(zip(prompts[:NUM_PROMPTS], filtered[:NUM_PROMPTS], strict=True))

    def answers(server: Server) -> list[list[int]]:
        with ThreadPoolExecutor(8) as pool:
            return list(
                pool.map(
                    lambda pair: ask(server, [pair[0]], {"sampling_params": pair[1]})[0][
                        "output_ids"
                    ],
                    mixed,
                )
            )

    expected, found = (answers(server) for server in seeded)
    assert found == expected


@pytest.mark.parametrize("name", ["temperature 0", "temperature 1.5", "all penalties", "regex"])
def test_logprobs_are_those_of_plain_decoding(
    seeded: tuple[Server, Server], prompts: list[list[int]], name: str
) -> None:
    body = {
        "sampling_params": CASES[name],
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 9],
        "logprob_start_len": 0,
    }
    fields = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    fields += ("input_token_logprobs", "input_top_logprobs")
    expected, found = (ask(server, prompts[:NUM_PROMPTS], body) for server in seeded)
    assert tokens(found) == tokens(expected)
    for one, two in zip(expected, found, strict=True):
        for field in fields:
            a, b = flatten(one["meta_info"][field]), flatten(two["meta_info"][field])
            assert len(a) == len(b), field
            for x, y in zip(a, b, strict=True):
                # fp32; a block's rows go through other GEMM shapes than a single token
                assert x == y or (isinstance(x, float) and x == pytest.approx(y, abs=2e-4)), field


def flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in flatten(part)]
    return [value]


@pytest.mark.parametrize("params", [{"temperature": 1.5, "seed": 4}, {"temperature": 0}])
def test_openai_parameters(
    seeded: tuple[Server, Server], questions: list[str], params: dict[str, Any]
) -> None:
    """logprobs, n and stop strings as most clients request them."""

    def answers(server: Server) -> list[Any]:
        found = []
        for question in questions[:5]:
            chat = server.client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": question}],
                max_tokens=NEW_TOKENS,
                n=3,
                logprobs=True,
                top_logprobs=2,
                stop=["the", "a "],
                **params,
            )
            for choice in chat.choices:
                content = choice.logprobs.content if choice.logprobs else []
                found.append(
                    (choice.message.content, choice.finish_reason, [x.token for x in content])
                )
            found.append(chat.usage.completion_tokens)
        return found

    expected, found = (answers(server) for server in seeded)
    assert found == expected


def test_required_tool_call(seeded: tuple[Server, Server], questions: list[str]) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}

    def call(server: Server, question: str) -> Any:
        chat = server.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": question}],
            tools=[tool],
            tool_choice="required",
            max_tokens=60,
            temperature=0,
        )
        message = chat.choices[0].message
        called = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        return message.content, called, chat.choices[0].finish_reason

    def calls(server: Server) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda q: call(server, q), questions[:NUM_PROMPTS]))

    expected, found = (calls(server) for server in seeded)
    assert found == expected
    assert any(called for _, called, _ in found), "no answer was a tool call"


@pytest.mark.usual_schedule("in turn")
def test_custom_logit_processor(
    seeded: tuple[Server, Server], prompts: list[list[int]], greedy: list[list[int]], schedule: str
) -> None:
    """Served without overlap; refused with it, where a processor would see a stale answer."""
    from processors import NoEcho

    # SGLang passes the request to a processor only if there are custom_params
    body = {
        "sampling_params": GREEDY | {"custom_params": {"reach": 4}},
        "custom_logit_processor": NoEcho.to_str(),
    }
    if schedule != "in turn":
        refused = requests.post(
            f"{seeded[1].url}/generate", json={**body, "input_ids": prompts[0]}, timeout=60
        )
        assert refused.status_code == 400
        assert "--disable-overlap-schedule" in refused.text
        return
    expected, found = (tokens(ask(server, prompts[:NUM_PROMPTS], body)) for server in seeded)
    assert found == expected
    assert expected != greedy


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(
    seeded: tuple[Server, Server], prompts: list[list[int]]
) -> None:
    for server in seeded:
        body = {"sampling_params": HOT}
        alone = tokens([ask(server, [ids], body)[0] for ids in prompts[:8]])
        again = tokens(ask(server, prompts[:8], body))
        assert alone == again
    # the cases above show that both servers agree


def test_what_cannot_be_exact_is_refused(
    seeded: tuple[Server, Server], prompts: list[list[int]]
) -> None:
    """The server stays up; the other refusals are tested in tests/glue."""
    body = {"input_ids": prompts[0], "sampling_params": {"min_p": 0.1, "temperature": 1.0}}
    response = requests.post(f"{seeded[1].url}/generate", json=body, timeout=60)
    assert response.status_code == 400
    assert "DFLASH cannot serve min_p exactly" in response.text
    assert ask(seeded[1], prompts[:1], {"sampling_params": GREEDY})


def test_min_p_is_served_unseeded(dflash: Server, prompts: list[list[int]]) -> None:
    """min_p needs the unseeded sampler; its distribution is tested in tests/glue."""
    answers = ask(dflash, prompts[:4], {"sampling_params": {"temperature": 1.0, "min_p": 0.2}})
    assert all(answer["output_ids"] for answer in answers)


def test_unseeded_requests_of_every_kind_are_served_in_one_batch(
    dflash: Server, prompts: list[list[int]]
) -> None:
    """Next to top_k and unfiltered sampling, greedy requests keep exactly their tokens. The
    sampled distributions are tested in tests/glue and tests/unit."""
    greedy = tokens(ask(dflash, prompts[:4], {"sampling_params": GREEDY}))
    hot = {"temperature": 50.0, "ignore_eos": True}
    kinds = [GREEDY, hot | {"top_k": 20, "top_p": 0.9}, hot]
    pairs = [(ids, params) for ids in prompts[:4] for params in kinds]

    def one(pair: tuple[list[int], dict[str, Any]]) -> list[int]:
        return tokens(ask(dflash, [pair[0]], {"sampling_params": pair[1]}))[0]

    with ThreadPoolExecutor(len(pairs)) as pool:
        found = list(pool.map(one, pairs))
    assert found[::3] == greedy
    for sampled in (found[1::3], found[2::3]):
        assert all(len(answer) == NEW_TOKENS for answer in sampled)
        assert sampled != greedy
