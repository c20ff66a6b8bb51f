"""Two tensor-parallel ranks answer as one does, and are counted as one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_dflash.testing.server import Server
from tests.e2e.conftest import SHAPE
from tests.e2e.test_metrics import totals

NEW_TOKENS = 60

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks of a CPU")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Server]:
    """The embedded pair sharded over two ranks, which communicate over gloo."""
    # with a single NUMA node, SGLang must be told the cores of each rank
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    metrics = ("--enable-metrics", "--decode-log-interval", "10")
    with Server(*SHAPE, "--tp-size", "2", *metrics, env=env) as server:
        yield server


def test_two_ranks_answer_as_plain_decoding(
    plain: Server, two_ranks: Server, prompts: list[list[int]]
) -> None:
    expected = plain.generate_all(prompts[:12], max_new_tokens=NEW_TOKENS)
    found = two_ranks.generate_all(prompts[:12], max_new_tokens=NEW_TOKENS)
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]
    assert two_ranks.acceptance()["accept_length"] >= 2.0


def test_two_ranks_are_counted_once(two_ranks: Server, prompts: list[list[int]]) -> None:
    """A dashboard sums everything that is exported."""
    two_ranks.generate_all(prompts[:4], max_new_tokens=NEW_TOKENS)
    counts = two_ranks.acceptance()
    assert totals(two_ranks, "verify_steps_total") == [counts["verify_steps"]]
    assert totals(two_ranks, "committed_tokens_total") == [counts["committed_tokens"]]
    lines = [line for line in two_ranks.log().splitlines() if "DFLASH: accept length" in line]
    assert lines and all(" TP0]" in line for line in lines)
