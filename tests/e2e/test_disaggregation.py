"""A prefill server and a decode server answer as one server does, in as many steps.

Their wire is a stand-in (tests/plugins/wire.py) under SGLang's own Mooncake backend.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import torch

from sglang_dflash.glue import release
from sglang_dflash.testing.server import ROOT, SCHEDULES, Server, ServerProcess, free_port
from tests.e2e.conftest import FULL_BLOCKS, SCRIPTED, SHAPE, start_together
from tests.e2e.test_exact import random_request, same_answers
from tests.e2e.test_sampling import SCHEMA
from tests.schedules import follows

pytestmark = [
    pytest.mark.usual_schedule("plan stream"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the wire copies a CPU's memory"),
]

# SGLang honours seeds in deterministic mode only
ARGS = (*SHAPE, "--enable-deterministic-inference")
# the KV of retracted requests: SGLang 0.5.23 would keep it in pinned memory, which needs a GPU
DECODE_ARGS = {"0.5.23": ("--disaggregation-decode-retraction-backup", "cpu_tensor")}
HOT = {"temperature": 1.5, "sampling_seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": HOT,
    "seeded, top_k and top_p": HOT | {"top_k": 8, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.5, "presence_penalty": 1.0},
    "penalty, seeded": HOT | {"frequency_penalty": 1.5},
    "min_new_tokens": {"min_new_tokens": 25},
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "regex, seeded": HOT | {"regex": "[a-zA-Z ]{12,40}\\."},
}


class Pair:
    """A prefill and a decode server, asked as SGLang's router does: both get every request."""

    def __init__(self, prefill: Server, decode: Server, bootstrap_port: int) -> None:
        self.prefill, self.decode, self.bootstrap_port = prefill, decode, bootstrap_port
        self._address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port}
        self._rooms = itertools.count(1)

    def generate(self, input_ids: list[int], **sampling_params: Any) -> dict[str, Any]:
        fields = {**self._address, "bootstrap_room": next(self._rooms)}
        with ThreadPoolExecutor(2) as pool:
            answers = [
                pool.submit(server.generate, input_ids, fields=fields, **sampling_params)
                for server in (self.prefill, self.decode)
            ]
            return [answer.result() for answer in answers][-1]

    def generate_all(self, prompts: list[list[int]], **sampling_params: Any) -> list[Any]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, **sampling_params), prompts))


@pytest.fixture(scope="module")
def servers(schedule: str) -> Iterator[tuple[Server, Pair]]:
    """One server, and a pair of them."""
    # compiling SGLang's seeded sampler takes longer than all tests together
    env = {"PYTHONPATH": SCRIPTED, "TORCHDYNAMO_DISABLE": "1", **FULL_BLOCKS}
    port = free_port()
    apart = ("--disaggregation-bootstrap-port", str(port), "--disaggregation-mode")
    wired = {**env, **SCHEDULES[schedule], "WIRE": "tcp", "SGLANG_HOST_IP": "127.0.0.1"}
    one, prefill, decode = start_together(
        Server(*ARGS, env=env),
        Server(*ARGS, *apart, "prefill", env=wired),
        Server(*ARGS, *apart, "decode", *DECODE_ARGS.get(release.installed(), ()), env=wired),
    )
    with one, prefill, decode:
        assert follows(prefill, schedule) and follows(decode, schedule)
        yield one, Pair(prefill, decode, port)


@pytest.fixture
def one(servers: tuple[Server, Pair]) -> Server:
    return servers[0]


@pytest.fixture
def pair(servers: tuple[Server, Pair]) -> Pair:
    return servers[1]


def outcomes(answers: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
    """Return tokens and verify steps of each answer."""
    return [(answer["output_ids"], answer["meta_info"]["spec_verify_ct"]) for answer in answers]


@pytest.mark.parametrize("name", CASES)
def test_answers_and_steps_are_those_of_one_server(
    one: Server, pair: Pair, prompts: list[list[int]], name: str
) -> None:
    """Tokens are right whatever is drafted. The number of steps is that of one server only if the
    drafter reads the same KV of the prompt."""
    params = {"max_new_tokens": 40, **CASES[name]}
    expected = outcomes(one.generate_all(prompts[:8], **params))
    assert outcomes(pair.generate_all(prompts[:8], **params)) == expected


def test_a_prompt_of_several_chunks(one: Server, pair: Pair, prompts: list[list[int]]) -> None:
    """Every chunk's draft KV is sent, not the last one's alone."""
    long = [sum(prompts[i : i + 10], []) for i in (8, 18)]
    assert all(3 * 64 < len(ids) < 400 for ids in long)
    expected = outcomes(one.generate_all(long, max_new_tokens=80))
    assert outcomes(pair.generate_all(long, max_new_tokens=80)) == expected


def test_a_cached_prefix_is_sent_with_its_draft_kv(
    one: Server, pair: Pair, prompts: list[list[int]]
) -> None:
    first = outcomes([pair.generate(prompts[28], max_new_tokens=60)])
    again = pair.generate(prompts[28], max_new_tokens=60)
    assert outcomes([again]) == first == outcomes([one.generate(prompts[28], max_new_tokens=60)])
    assert again["meta_info"]["cached_tokens"] > 0


def test_random_requests_of_mixed_shape(one: Server, pair: Pair, prompts: list[list[int]]) -> None:
    """Some end with the token of the prefill, while others run; every other one is sampled."""
    # top_k: beside greedy requests SGLang's sampler draws other tokens with a seed if unfiltered
    drawn = HOT | {"top_k": 8}
    chance = random.Random(2025)
    asked = [random_request(chance, prompts) for _ in range(16)]
    same_answers(one, pair, [(ids, p | drawn if i % 2 else p) for i, (ids, p) in enumerate(asked)])


def test_the_router_asks_both_servers(one: Server, pair: Pair, prompts: list[list[int]]) -> None:
    """As launch/pd.sh starts it."""
    port = free_port()
    servers = [f"prefill={pair.prefill.url},{pair.bootstrap_port}", f"decode={pair.decode.url}"]
    args = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = [str(ROOT / "launch" / "router.sh"), *servers, *args]

    def ask(ids: list[int]) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": 40}
        body = {"input_ids": ids, "sampling_params": params}
        response = requests.post(f"{router.url}/generate", json=body, timeout=120)
        response.raise_for_status()
        return response.json()

    with ServerProcess(command, port=port, env={}) as router:
        while not requests.get(f"{router.url}/readiness", timeout=30).ok:
            time.sleep(0.2)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, prompts[:4]))
    assert outcomes(found) == outcomes(one.generate_all(prompts[:4], max_new_tokens=40))


def test_nothing_leaks(pair: Pair) -> None:
    """After all tests above, every KV slot of both servers is free again."""
    for server in (pair.prefill, pair.decode):
        server.flush_cache()
        assert server.state()["sglang_dflash"]["free_kv_slots"] == 8192
        assert "leak" not in server.log().lower()
