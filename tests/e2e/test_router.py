"""SGLang's router in front of two replicas: answers, balance, counts, and a replica that dies."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import requests
import torch

from sglang_dflash.testing.server import ROOT, Server, ServerProcess, free_port
from tests.e2e.conftest import SHAPE, start_together
from tests.e2e.test_exact import ask
from tests.e2e.test_metrics import totals

NEW_TOKENS = 60
LONG = 900
# for sixteen such answers on the replica that is left
ROOM = ("--context-length", "1024", "--max-total-tokens", "16384")
LASTING: dict[str, Any] = {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
SHORT = LASTING | {"max_tokens": NEW_TOKENS}
# far less than any timeout of the router or the client
SOON_S = 15
PATIENCE_S = 120

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two replicas on one card")


class Router(ServerProcess):
    """`launch/router.sh` in front of servers."""

    def __init__(self, replicas: list[Server]) -> None:
        port, self.metrics_port = free_port(), free_port()
        command = [str(ROOT / "launch" / "router.sh"), *(replica.url for replica in replicas)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.metrics_port)]
        # a balance that few requests show, and a death that is noticed within seconds
        command += ["--balance-abs-threshold", "1", "--health-check-interval-secs", "1"]
        super().__init__(command, port=port, env={})
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
        )

    def generate(self, question: str) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"text": question, "sampling_params": params}
        response = requests.post(f"{self.url}/generate", json=body, timeout=PATIENCE_S)
        response.raise_for_status()
        return response.json()

    def healthy(self) -> int:
        """Return the number of replicas that the router would send a request to."""
        workers = requests.get(f"{self.url}/workers", timeout=30).json()["workers"]
        return sum(worker["is_healthy"] for worker in workers)

    def wait_for_healthy(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.healthy() != count:
            assert time.monotonic() < deadline, self.log()[-3000:]
            time.sleep(0.2)

    def counted(self, name: str) -> float:
        """Return the sum over all series of one of the router's own metrics."""
        text = requests.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30).text
        return sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.M))


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Server]]:
    args = (*SHAPE, *ROOM, "--enable-metrics")
    servers = start_together(Server(*args), Server(*args))
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def router(replicas: list[Server]) -> Iterator[Router]:
    with Router(replicas) as found:
        found.wait_for_healthy(2)
        yield found


class End(NamedTuple):
    """How a stream ended: when, and the error that cut it short, if any."""

    at: float
    error: Exception | None


def stream(client: openai.OpenAI, question: str, max_tokens: int, pieces: list[str]) -> End:
    """Stream an answer into `pieces`."""
    try:
        for chunk in client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
    except (httpx.RemoteProtocolError, openai.APIError) as error:
        return End(time.monotonic(), error)
    return End(time.monotonic(), None)


def test_an_answer_through_the_router_is_that_of_a_replica(
    router: Router, replicas: list[Server], questions: list[str]
) -> None:
    expected = ask(replicas[1], questions[0], **SHORT)
    assert ask(router, questions[0], **SHORT) == expected
    pieces: list[str] = []
    assert stream(router.client, questions[0], NEW_TOKENS, pieces).error is None
    assert "".join(pieces) == expected[0]
    assert len(pieces) > 5, "streamed, not sent at the end"


def test_both_replicas_serve_and_their_counts_add_up_to_what_was_asked(
    router: Router, replicas: list[Server], questions: list[str]
) -> None:
    """Through /generate: the router's chats leave out what it does not know, such as
    `return_meta_info`."""
    names = ("committed_tokens", "verify_steps", "accepted_tokens")

    def counts() -> list[dict[str, float]]:
        return [{name: sum(totals(each, f"{name}_total")) for name in names} for each in replicas]

    before = counts()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(router.generate, questions[:12]))
    added = [
        {name: now[name] - old[name] for name in names}
        for old, now in zip(before, counts(), strict=True)
    ]
    assert all(each["verify_steps"] for each in added), "both have worked"
    # the first token of an answer comes from prefill
    assert sum(each["committed_tokens"] for each in added) == 12 * (NEW_TOKENS - 1)
    own = [answer["meta_info"]["dflash"] for answer in answers]
    for name in ("verify_steps", "accepted_tokens"):
        assert sum(each[name] for each in added) == sum(each[name] for each in own)


def test_a_replica_that_is_killed_leaves_its_requests_to_the_other(
    router: Router, replicas: list[Server], questions: list[str]
) -> None:
    """The router asks again for whole answers. A stream that has begun cannot be asked for again:
    it ends with an error, at once. This is the last test of the file: one replica is gone."""
    doomed, survivor = replicas
    told: list[list[str]] = [[] for _ in range(8)]
    retries = router.counted("smg_worker_retries_total")
    with ThreadPoolExecutor(16) as pool:
        whole = [pool.submit(ask, router, text, **LASTING) for text in questions[:8]]
        streams = [
            pool.submit(stream, router.client, text, LONG, pieces)
            for text, pieces in zip(questions[8:16], told, strict=True)
        ]
        wait_until_all_begin(told, whole)
        os.killpg(doomed.pid, signal.SIGKILL)
        killed = time.monotonic()
        ends = [future.result(PATIENCE_S) for future in streams]
        answers = [future.result(PATIENCE_S) for future in whole]
    cut_short = [end.at - killed for end in ends if end.error is not None]
    assert 0 < len(cut_short) < len(ends), "each of the two had some streams"
    assert max(cut_short) < SOON_S
    assert router.counted("smg_worker_retries_total") > retries, "some were on the dead one"
    with ThreadPoolExecutor(8) as pool:
        expected = pool.map(lambda text: ask(survivor, text, **LASTING), questions[:8])
        assert answers == list(expected)
    router.wait_for_healthy(1)
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        later = list(pool.map(lambda text: ask(router, text, **SHORT), questions[16:20]))
    assert all(tokens == NEW_TOKENS for _, tokens, _ in later)
    assert time.monotonic() - began < PATIENCE_S / 4


def wait_until_all_begin(told: list[list[str]], whole: list[Future[Any]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(told):
        assert time.monotonic() < deadline, "a stream has not begun"
        time.sleep(0.05)
    assert not all(future.done() for future in whole), "too short: nothing is in flight"
