"""Two nodes, here two launches on one machine: they answer as one server, and do not wait for ever
for a node that is missing, different or dead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import torch

from sglang_dflash.testing.server import Server, free_port
from tests.e2e.conftest import SHAPE, TWO_CORES, start_together
from tests.e2e.test_metrics import totals

NEW_TOKENS = 40
# SGLang honours seeds in deterministic mode only
ARGS = (*SHAPE, "--enable-deterministic-inference")
# compiling SGLang's seeded sampler takes longer than all tests together
ENV = {"TORCHDYNAMO_DISABLE": "1"}
HOT = {"temperature": 1.5, "sampling_seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": HOT,
    "seeded, top_k and top_p": HOT | {"top_k": 8, "top_p": 0.8},
    "penalty, seeded": HOT | {"presence_penalty": 1.0},
    "regex, seeded": HOT | {"regex": "[a-zA-Z ]{12,40}\\."},
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks of a CPU")


def node(rank: int, port: int, *args: str) -> Server:
    """One of two nodes that meet at a port."""
    return Server(
        *ARGS,
        *("--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank)),
        *("--dist-init-addr", f"127.0.0.1:{port}", "--dist-timeout", "300", *args),
        env={**TWO_CORES, **ENV},
    )


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """Plain decoding, and two nodes."""
    port = free_port()
    nodes = [node(rank, port, "--enable-metrics") for rank in (0, 1)]
    found = start_together(Server(*ARGS, plain=True, env=ENV), *nodes)
    yield found
    for each in found:
        each.stop()


@pytest.fixture
def two_nodes(servers: list[Server]) -> list[Server]:
    return servers[1:]


@pytest.mark.parametrize("name", CASES)
def test_two_nodes_answer_as_plain_decoding(
    servers: list[Server], prompts: list[list[int]], name: str
) -> None:
    plain, first, _ = servers
    params = {"max_new_tokens": NEW_TOKENS, **CASES[name]}
    expected = plain.generate_all(prompts[:5], **params)
    found = first.generate_all(prompts[:5], **params)
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]


def test_two_nodes_are_counted_once(two_nodes: list[Server], prompts: list[list[int]]) -> None:
    first, second = two_nodes
    first.generate_all(prompts[:4], max_new_tokens=NEW_TOKENS)
    counts = first.acceptance()
    assert counts["accept_length"] > 1.0
    # the second node has no requests of its own, and must not be counted beside the first
    assert totals(first, "verify_steps_total") == [counts["verify_steps"]]
    assert requests.get(f"{second.url}/metrics", timeout=30).text.count("dflash_verify") == 0


def test_a_node_that_dies_ends_the_other(two_nodes: list[Server]) -> None:
    """A server that stays would accept requests that it can never answer. The last test of the
    file that uses these nodes."""
    first, second = two_nodes
    os.killpg(second.pid, signal.SIGKILL)
    assert first.wait_for_exit(60) != 0
    assert "Rank 1 of this server (process " in first.log()
    assert "has ended, and rank 0 cannot go on without it. Its log says why." in first.log()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{first.url}/health", timeout=5)


def test_nodes_that_disagree_or_are_missing_end_with_a_sentence() -> None:
    """Both of a pair with different blocks, and one that is alone; together, because each start
    takes longer than all the rest."""
    met, alone = free_port(), free_port()
    servers = [
        node(0, met),
        node(1, met, "--speculative-num-draft-tokens", "8"),
        node(0, alone, "--dist-timeout", "5"),
    ]
    try:
        ends = [server.wait_for_exit() for server in servers]
    finally:
        for server in servers:
            server.stop()
    assert 0 not in ends
    differ = "disagree on the block size: it is 16 on rank 0 and 8 on rank 1. Start every node"
    missing = f"The 2 ranks did not meet at tcp://127.0.0.1:{alone} (Timed out after "
    for server, sentence in zip(servers, (differ, differ, missing), strict=True):
        assert sentence in server.log(), server.log()[-3000:]
