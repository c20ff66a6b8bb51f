"""Prompts as embeddings, which SGLang accepts only without its radix cache and in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from safetensors.torch import load_file

from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import FULL_BLOCKS, SHAPE, start_together
from tests.e2e.test_bf16 import NEAR_TIE, plain_with_gaps

UNCACHED = (*SHAPE, "--disable-radix-cache")
HALF = (*UNCACHED, "--dtype", "bfloat16")
NEW_TOKENS = 120


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """Plain decoding and DFLASH in bf16, and DFLASH in fp32."""
    started = start_together(
        Server(*HALF, plain=True),
        # one width: products of other sizes round differently in bf16
        Server(*HALF, env={"OVERLAP": "1", **FULL_BLOCKS}),
        Server(*UNCACHED),
    )
    yield started
    for server in started:
        server.stop()


def embed(prompt: list[int]) -> list[list[float]]:
    table = load_file(tiny_target() / "model.safetensors")["model.embed_tokens.weight"]
    return table[prompt].float().tolist()


def ask(server: Server, prompt: list[int], **more: Any) -> requests.Response:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, **more}
    body = {"input_embeds": embed(prompt), "sampling_params": params}
    return requests.post(f"{server.url}/generate", json=body, timeout=300)


def test_embeddings_of_tokens_are_answered_like_the_tokens(
    servers: list[Server], prompts: list[list[int]]
) -> None:
    _, dflash, _ = servers
    expected = [dflash.generate(p, max_new_tokens=NEW_TOKENS)["output_ids"] for p in prompts[:8]]
    alone = [ask(dflash, prompt).json()["output_ids"] for prompt in prompts[:8]]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: ask(dflash, prompt).json(), prompts[:8]))
    assert alone == expected
    assert [answer["output_ids"] for answer in answers] == expected


def test_embeddings_and_tokens_meet_in_a_prefill(
    servers: list[Server], prompts: list[list[int]]
) -> None:
    """SGLang keeps embeddings only of the requests that sent them, and crashes on such a batch."""
    _, dflash, _ = servers
    expected = [dflash.generate(p, max_new_tokens=NEW_TOKENS)["output_ids"] for p in prompts[:8]]

    def one(i: int) -> list[int]:
        if i % 2:
            return ask(dflash, prompts[i]).json()["output_ids"]
        return dflash.generate(prompts[i], max_new_tokens=NEW_TOKENS)["output_ids"]

    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(one, range(8))) == expected


def test_every_difference_from_plain_decoding_is_a_near_tie(
    servers: list[Server], prompts: list[list[int]]
) -> None:
    plain, dflash, _ = servers
    same = 0
    for prompt in prompts[:8]:
        found = ask(dflash, prompt).json()["output_ids"]
        expected, gaps = plain_with_gaps(plain, prompt)
        ahead = [k for k, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b]
        same += found == expected
        assert not ahead or gaps[ahead[0]] < NEAR_TIE
    assert same >= 4


def test_a_target_that_cannot_read_them_refuses(
    servers: list[Server], prompts: list[list[int]]
) -> None:
    """SGLang crashes here."""
    *_, dflash = servers
    response = ask(dflash, prompts[0])
    assert response.status_code == 400
    assert "DFLASH cannot serve input_embeds" in response.text
    assert dflash.generate(prompts[0], max_new_tokens=8)["output_ids"]
