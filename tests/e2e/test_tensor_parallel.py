"""Two tensor-parallel ranks answer as one does, and are counted as one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
import widths as plugin

from sglang_dflash.testing.server import SCHEDULES, Server
from tests.e2e.conftest import SCRIPTED, SHAPE, TWO_CORES
from tests.e2e.test_metrics import totals
from tests.e2e.test_widths import added

NEW_TOKENS = 60
# of one rank with the other, on cores that other tests share
PATIENCE_S = 15

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks of a CPU")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with widths that a test may give."""
    return tmp_path_factory.mktemp("ranks") / "given"


@pytest.fixture(scope="module")
def two_ranks(given: Path) -> Iterator[Server]:
    """The embedded pair sharded over two ranks, which communicate over gloo."""
    env = {
        "PYTHONPATH": SCRIPTED,
        "WIDTHS": str(given),
        "SGLANG_DFLASH_RANK_PATIENCE": str(PATIENCE_S),
    }
    env |= TWO_CORES | SCHEDULES["plan stream"]
    metrics = ("--enable-metrics", "--decode-log-interval", "10")
    with Server(*SHAPE, "--tp-size", "2", *metrics, env=env) as server:
        yield server


def test_two_ranks_answer_as_plain_decoding(
    plain: Server, two_ranks: Server, prompts: list[list[int]], given: Path
) -> None:
    expected = plain.generate_all(prompts[:12], max_new_tokens=NEW_TOKENS)
    # full blocks: on a busy machine the automatic width may rightly choose not to draft
    plugin.give(given, 16)
    found = two_ranks.generate_all(prompts[:12], max_new_tokens=NEW_TOKENS)
    plugin.give(given)
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]
    assert two_ranks.acceptance()["accept_length"] >= 2.0


@pytest.mark.parametrize(
    "params",
    [{"frequency_penalty": 0.7}, {"regex": "[a-z ,.]{20,60}"}],
    ids=["penalty", "grammar"],
)
def test_two_ranks_adjust_logits_as_plain_decoding(
    plain: Server, two_ranks: Server, prompts: list[list[int]], params: dict[str, Any]
) -> None:
    expected = plain.generate_all(prompts[:4], max_new_tokens=NEW_TOKENS, **params)
    found = two_ranks.generate_all(prompts[:4], max_new_tokens=NEW_TOKENS, **params)
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]


@pytest.mark.parametrize("top_k", [-1, 8], ids=["unfiltered", "top_k"])
def test_greedy_requests_beside_sampled_ones_answer_as_plain_decoding(
    plain: Server, two_ranks: Server, prompts: list[list[int]], top_k: int
) -> None:
    """Ranks that drew different drafts would mix the activations of different tokens."""
    expected = plain.generate_all(prompts[:6], max_new_tokens=NEW_TOKENS)
    sampled = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_k": top_k}
    with ThreadPoolExecutor(1) as beside:
        drawn = beside.submit(two_ranks.generate_all, prompts[6:12], **sampled)
        found = two_ranks.generate_all(prompts[:6], max_new_tokens=NEW_TOKENS)
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]
    for answer in drawn.result():
        assert answer["meta_info"]["finish_reason"]["type"] in ("stop", "length")


def test_ranks_choose_their_rows_as_the_first_one_does(
    plain: Server, two_ranks: Server, prompts: list[list[int]], given: Path
) -> None:
    """Each has a clock of its own, and would choose differently: ranks with different numbers of
    rows wait for each other for ever."""
    width = two_ranks.state()["sglang_dflash"]["width"]
    assert (width["mode"], width["shares_rows"]) == ("auto", True)
    expected = plain.generate_all(prompts[:8], max_new_tokens=NEW_TOKENS)
    plugin.give(given, 16, 1, 5, "1*4", -3)
    before = two_ranks.acceptance()
    found = two_ranks.generate_all(prompts[:8], max_new_tokens=NEW_TOKENS)
    plugin.give(given)
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]
    assert {1, 5, 16} < set(added(two_ranks, before)["at_width"])


def test_two_ranks_are_counted_once(two_ranks: Server, prompts: list[list[int]]) -> None:
    """A dashboard sums everything that is exported."""
    two_ranks.generate_all(prompts[:4], max_new_tokens=NEW_TOKENS)
    counts = two_ranks.acceptance()
    assert totals(two_ranks, "verify_steps_total") == [counts["verify_steps"]]
    assert totals(two_ranks, "committed_tokens_total") == [counts["committed_tokens"]]
    lines = [line for line in two_ranks.log().splitlines() if "DFLASH: accept length" in line]
    assert lines and all(" TP0]" in line for line in lines)


def second_rank(server: Server) -> psutil.Process:
    """Return the process of rank 1, by its title."""
    ranks = psutil.Process(server.pid).children(recursive=True)
    found = next((each for each in ranks if "scheduler_TP1" in " ".join(each.cmdline())), None)
    assert found is not None, [each.cmdline() for each in ranks]
    return found


def test_a_rank_that_hangs_is_named_and_ends_the_server(
    two_ranks: Server, prompts: list[list[int]]
) -> None:
    """The other would wait for it for ever, and with it every request. The last test of the file:
    the server is gone."""
    stopped = second_rank(two_ranks)
    stopped.suspend()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(two_ranks.generate, prompts[0], max_new_tokens=NEW_TOKENS)
        assert two_ranks.wait_for_exit(120) != 0
        with pytest.raises(requests.ConnectionError):
            asked.result(30)
    assert time.monotonic() - began < 120
    lines = two_ranks.log().splitlines()
    sentence = next((line for line in lines if "This server ends." in line), "")
    assert sentence, "\n".join(lines[-40:])
    assert f" TP0] Rank 1 of this server (process {stopped.pid} on " in sentence
    assert (
        f") has not answered rank 0 for {PATIENCE_S} s, and no rank can go on without it."
        in sentence
    )
