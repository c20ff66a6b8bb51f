"""A DFLASH server answers token for token like the same server without speculation."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_dflash.testing.server import Server


class Remembered:
    """A server whose answers are kept, so that it is asked for each of them once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._answers: dict[str, Any] = {}

    def recall(self, how: Callable[..., Any], *words: Any, **options: Any) -> Any:
        key = repr((how.__name__, words, sorted(options.items())))
        if key not in self._answers:
            self._answers[key] = how(self._server, *words, **options)
        return self._answers[key]

    def generate(self, ids: list[int], **params: Any) -> dict[str, Any]:
        return self.recall(Server.generate, ids, **params)

    def generate_all(self, prompts: list[list[int]], **params: Any) -> list[dict[str, Any]]:
        return self.recall(Server.generate_all, prompts, **params)


@pytest.fixture(scope="module")
def plain(plain: Server) -> Remembered:
    """Plain decoding, with which every schedule is compared."""
    return Remembered(plain)


def ask(server: Server | Remembered, content: str, **options: Any) -> tuple[str, int, str]:
    """Ask through the OpenAI client; return text, token count and finish reason."""
    if isinstance(server, Remembered):
        return server.recall(ask, content, **options)
    answer = server.client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": content}],
        **{"temperature": 0, "max_tokens": 120, **options},
    )
    choice = answer.choices[0]
    return choice.message.content or "", answer.usage.completion_tokens, choice.finish_reason


def ask_streaming(
    server: Server | Remembered, content: str, **options: Any
) -> tuple[str, int, str]:
    """Like `ask`, but streamed."""
    if isinstance(server, Remembered):
        return server.recall(ask_streaming, content, **options)
    text, tokens, reason = "", 0, ""
    for chunk in server.client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": content}],
        stream=True,
        stream_options={"include_usage": True},
        **{"temperature": 0, "max_tokens": 120, **options},
    ):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, tokens, reason


def ask_all(
    server: Server | Remembered, asked: list[tuple[str, dict[str, Any]]]
) -> list[tuple[str, int, str]]:
    """Ask several questions at the same time, each with its own options."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda each: ask(server, each[0], **each[1]), asked))


def same_ids(plain: Remembered, dflash: Server, prompts: list[list[int]], **params: Any) -> None:
    expected = [answer["output_ids"] for answer in plain.generate_all(prompts, **params)]
    found = [answer["output_ids"] for answer in dflash.generate_all(prompts, **params)]
    assert found == expected


@pytest.mark.parametrize("how", [ask, ask_streaming], ids=["whole", "streamed"])
def test_single_requests(plain: Remembered, dflash: Server, questions: list[str], how: Any) -> None:
    for question in questions[:6]:
        assert how(dflash, question) == how(plain, question)


def test_drafts_are_accepted(dflash: Server, questions: list[str]) -> None:
    """Exactness alone would also hold for a drafter that is never right."""
    before = dflash.acceptance()
    for question in questions[6:12]:
        ask(dflash, question)
    after = dflash.acceptance()
    steps = after["verify_steps"] - before["verify_steps"]
    assert (after["committed_tokens"] - before["committed_tokens"]) / steps >= 3.0


@pytest.mark.parametrize("how", [ask, ask_streaming], ids=["whole", "streamed"])
def test_eight_concurrent_requests(
    plain: Remembered, dflash: Server, questions: list[str], how: Any
) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda q: how(dflash, q), questions[12:20]))
        expected = list(pool.map(lambda q: how(plain, q), questions[12:20]))
    assert found == expected


def test_eight_concurrent_requests_by_token_id(
    plain: Remembered, dflash: Server, prompts: list[list[int]]
) -> None:
    same_ids(plain, dflash, prompts[20:28], max_new_tokens=150)


def test_shared_prefixes_that_hit_the_cache(
    plain: Remembered, dflash: Server, prompts: list[list[int]]
) -> None:
    """A cached prefix keeps the draft KV written when it was first prefilled."""
    prefix = prompts[28] + prompts[29]
    longer = [prefix + prompts[i] for i in (30, 31, 32)]
    for server in (plain, dflash):
        server.generate(prefix, max_new_tokens=40)
    for ids in longer:
        expected = plain.generate(ids, max_new_tokens=60)
        found = dflash.generate(ids, max_new_tokens=60)
        assert found["output_ids"] == expected["output_ids"]
        assert found["meta_info"]["cached_tokens"] >= len(prefix)


def test_acceptance_survives_a_cache_hit(dflash: Server, prompts: list[list[int]]) -> None:
    """A repeated question that hits the prefix cache drafts as well as the first time."""
    first = dflash.generate(prompts[33], max_new_tokens=100)["meta_info"]
    again = dflash.generate(prompts[33], max_new_tokens=100)["meta_info"]
    assert again["cached_tokens"] > 0
    assert again["spec_verify_ct"] == first["spec_verify_ct"]


def test_prompt_longer_than_the_prefill_chunk(
    plain: Remembered, dflash: Server, prompts: list[list[int]]
) -> None:
    long = [sum((prompts[i] for i in group), []) for group in ((34, 35, 36, 37), (38, 39, 40, 41))]
    assert all(len(ids) > 64 for ids in long)
    same_ids(plain, dflash, long, max_new_tokens=80)


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17])
def test_max_tokens(
    plain: Remembered, dflash: Server, questions: list[str], max_tokens: int
) -> None:
    for question in questions[42:45]:
        expected = ask(plain, question, max_tokens=max_tokens)
        assert ask(dflash, question, max_tokens=max_tokens) == expected
        assert expected[1] <= max_tokens


def test_end_of_text_in_the_block_that_reaches_max_tokens(
    plain: Remembered, dflash: Server, questions: list[str]
) -> None:
    """SGLang checks max_tokens first, for the whole block, and would return tokens past the end."""
    whole = ask_all(plain, [(question, {"max_tokens": 300}) for question in questions[42:46]])
    assert [reason for _, _, reason in whole] == ["stop"] * 4
    asked = [
        (question, {"max_tokens": tokens + extra})
        for question, (_, tokens, _) in zip(questions[42:46], whole, strict=True)
        for extra in (-1, 0, 1, 2, 7, 14)
    ]
    assert ask_all(dflash, asked) == ask_all(plain, asked)


def test_stop_strings(plain: Remembered, dflash: Server, questions: list[str]) -> None:
    """The stop string ends inside a block: nothing after it is returned or counted."""
    stopped = 0
    for question in questions[45:50]:
        words = ask(plain, question)[0].split()
        stop = words[len(words) // 2]
        expected = ask(plain, question, stop=[stop])
        assert ask(dflash, question, stop=[stop]) == expected
        assert ask_streaming(dflash, question, stop=[stop]) == expected
        stopped += expected[2] == "stop"
    assert stopped == 5


def test_end_of_text_inside_a_block(
    plain: Remembered, dflash: Server, questions: list[str]
) -> None:
    asked = [(question, {"max_tokens": 400}) for question in questions[50:56]]
    ended = ask_all(dflash, asked)
    assert ended == ask_all(plain, asked)
    inside = [tokens % 16 != 1 for _, tokens, reason in ended if reason == "stop"]
    assert inside and any(inside)


def test_ignore_eos_runs_on(plain: Remembered, dflash: Server, prompts: list[list[int]]) -> None:
    same_ids(plain, dflash, prompts[56:58], max_new_tokens=200, ignore_eos=True)


def test_request_to_the_context_length_beside_another(
    plain: Remembered, dflash: Server, prompts: list[list[int]]
) -> None:
    """In-tree DFLASH reserves slots past the end of the request's row, in its neighbour's."""
    together = [prompts[58], prompts[59], prompts[60]]

    def to_the_end(server: Server | Remembered) -> list[list[int]]:
        with ThreadPoolExecutor(3) as pool:
            answers = pool.map(
                lambda ids: server.generate(ids, max_new_tokens=511 - len(ids), ignore_eos=True),
                together,
            )
            return [answer["output_ids"] for answer in answers]

    expected = to_the_end(plain)
    assert to_the_end(dflash) == expected
    assert [len(p) + len(a) for p, a in zip(together, expected, strict=True)] == [510] * 3


def random_request(chance: random.Random, prompts: list[list[int]]) -> tuple[list[int], dict]:
    ids = list(chance.choice(prompts))
    for _ in range(chance.choice([0, 0, 1, 3])):
        ids += chance.choice(prompts)
    params: dict[str, Any] = {"max_new_tokens": chance.choice([1, 3, 16, 40, 90, 180])}
    if chance.random() < 0.3:
        params["ignore_eos"] = True
    if chance.random() < 0.2:
        params["stop_token_ids"] = [chance.randrange(1024) for _ in range(20)]
    return ids[:400], params


def same_answers(plain: Remembered, dflash: Server, requests: list[tuple[Any, ...]]) -> None:
    """Compare the answers to requests of prompt and parameters, twelve at a time."""
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda r: dflash.generate(r[0], **r[1]), requests))
        expected = list(pool.map(lambda r: plain.generate(r[0], **r[1]), requests))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


def test_fifty_random_requests_of_mixed_shape(
    plain: Remembered, dflash: Server, prompts: list[list[int]]
) -> None:
    chance = random.Random(2024)
    same_answers(plain, dflash, [random_request(chance, prompts) for _ in range(50)])


def test_aborts_in_mid_stream_leave_the_others_alone(
    plain: Remembered, dflash: Server, questions: list[str]
) -> None:
    expected = [ask(plain, question, max_tokens=200) for question in questions[:4]]
    found: list[Any] = [None] * 4

    def leave_early(question: str, after: int) -> None:
        stream = dflash.client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _, _chunk in zip(range(after), stream, strict=False):
            pass
        stream.close()

    def stay(i: int) -> None:
        found[i] = ask(dflash, questions[i], max_tokens=200)

    threads = [threading.Thread(target=stay, args=(i,)) for i in range(4)]
    threads += [
        threading.Thread(target=leave_early, args=(questions[10 + i], 1 + 2 * i)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_seedless_sampling_samples(dflash: Server, prompts: list[list[int]]) -> None:
    """temperature > 0 really samples (in-tree DFLASH turns it into greedy on a CPU)."""
    # hot enough that 40 draws from 50 tokens never coincide
    params = {"temperature": 50, "top_k": 50, "max_new_tokens": 40, "ignore_eos": True}
    texts = {tuple(dflash.generate(prompts[0], **params)["output_ids"]) for _ in range(4)}
    assert len(texts) == 4


def test_nothing_leaks(dflash: Server) -> None:
    """After all tests above, every KV slot is free again and SGLang's check is silent."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if requests.post(f"{dflash.url}/flush_cache", timeout=30).ok:
            break
        time.sleep(0.5)
    assert dflash.state()["sglang_dflash"]["free_kv_slots"] == 8192
    time.sleep(2)  # idle: SGLang's own invariant check runs and would kill the server
    assert "leak" not in dflash.log().lower()
    dflash.generate([1, 2, 3], max_new_tokens=2)
