"""Data-parallel replicas of one server are counted together, and each is reported by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from launch import client
from sglang_dflash.metrics import replicas_of
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import SHAPE, TWO_CORES
from tests.e2e.test_metrics import command, totals

NEW_TOKENS = 40

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two replicas on one card")


@pytest.fixture(scope="module")
def two_replicas(prompts: list[list[int]]) -> Iterator[Server]:
    """Two replicas of the embedded pair, after eight sequential requests."""
    with Server(*SHAPE, "--dp-size", "2", "--enable-metrics", env=TWO_CORES) as server:
        for prompt in prompts[:8]:
            server.generate(prompt, max_new_tokens=NEW_TOKENS)
        yield server


def test_counts_are_those_of_all_replicas(two_replicas: Server) -> None:
    replicas = replicas_of(two_replicas.info())
    assert list(replicas) == ["dp_rank 0", "dp_rank 1"]
    steps = [each["acceptance"]["verify_steps"] for each in replicas.values()]
    assert all(steps), "both have worked"
    assert two_replicas.acceptance()["verify_steps"] == sum(steps)
    counts = client.acceptance(two_replicas.url)
    assert counts is not None and counts["verify_steps"] == sum(steps)
    assert sorted(totals(two_replicas, "verify_steps_total")) == sorted(steps)


def test_report_shows_the_sum_and_each_replica(two_replicas: Server) -> None:
    shown = command("report", "--url", two_replicas.url, "--looks", "1").stdout
    whole = two_replicas.acceptance()
    assert f"accept length {whole['accept_length']:.2f} over {whole['verify_steps']} " in shown
    for name, each in replicas_of(two_replicas.info()).items():
        numbers = each["acceptance"]
        length, steps = numbers["accept_length"], numbers["verify_steps"]
        assert f"{name}: accept length {length:.2f} over {steps} verify steps, alarms 0" in shown
