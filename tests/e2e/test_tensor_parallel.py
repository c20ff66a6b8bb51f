"""Two ranks that share a pair answer as one does, and are counted as one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from e2e.conftest import SHAPE
from server import Server

NEW_TOKENS = 60

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks of a CPU")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Server]:
    """The embedded pair, cut in two; ranks talk over gloo."""
    # SGLang wants to know the cores of each rank where there is one NUMA node
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(*SHAPE, "--tp-size", "2", "--enable-metrics", env=env) as server:
        yield server


def test_two_ranks_answer_as_plain_decoding(
    plain: Server, two_ranks: Server, prompts: list[list[int]]
) -> None:
    expected = plain.generate_all(prompts[:12], max_new_tokens=NEW_TOKENS)
    found = two_ranks.generate_all(prompts[:12], max_new_tokens=NEW_TOKENS)
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]
    assert two_ranks.acceptance()["accept_length"] >= 2.0
