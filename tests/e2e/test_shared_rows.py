"""Requests that verify different numbers of rows in one step, as their drafts deserve.

Answers are compared with plain decoding's, drafts with those of the oracle. Shared rows also take
their turn with other widths in tests/e2e/test_widths.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import widths as plugin

from sglang_dflash.reference import Drafter
from sglang_dflash.testing.server import SCHEDULES, Server
from tests.e2e.conftest import SCRIPTED, SHAPE
from tests.e2e.test_sampling import tokens
from tests.e2e.test_widths import COLD, added, check_blocks

NEW_TOKENS = 60
LONG = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
MOST_TURNS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def sharing(folder: Path) -> Iterator[Server]:
    """A server whose rows a test may give. A step is chosen before the last one's result is
    known."""
    env = {"PYTHONPATH": SCRIPTED, "SCRIPT_FOLDER": str(folder), "WIDTHS": str(folder / "given")}
    with Server(*SHAPE, env=env | SCHEDULES["plan stream"]) as server:
        assert server.state()["sglang_dflash"]["width"]["shares_rows"]
        yield server


@pytest.fixture(scope="module")
def expected(plain: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Plain decoding's answers to the first prompts."""
    return tokens(plain.generate_all(prompts[:12], **LONG))


@pytest.fixture
def give(folder: Path) -> Iterator[Callable[..., None]]:
    """Set the widths of the next steps, as tests/plugins/widths.py reads them."""
    yield partial(plugin.give, folder / "given")
    plugin.give(folder / "given")


@pytest.mark.parametrize("params", [{}, COLD, COLD | {"top_k": 20}], ids=str)
@pytest.mark.parametrize("rows", [2, 4])
def test_rows_are_shared_out_by_confidence(
    sharing: Server,
    prompts: list[list[int]],
    expected: list[list[int]],
    give: Callable[..., None],
    params: dict[str, Any],
    rows: int,
) -> None:
    """Greedy, and sampled so cold that it is: the requests have so many rows together, and each has
    a number of its own."""
    give(-rows)
    before = sharing.acceptance()
    assert tokens(sharing.generate_all(prompts[:12], **LONG, **params)) == expected
    gained = added(sharing, before)
    steps, verified = gained["verify_steps"], gained["verified_rows"]
    # a request that has just ended may still take its share of a step that counts for nothing
    assert 0.85 * rows * steps < verified < 1.15 * rows * steps
    assert len(gained["at_width"]) > rows


def test_kinds_that_sglang_samples_keep_one_width(
    sharing: Server, prompts: list[list[int]], give: Callable[..., None]
) -> None:
    """One penalised request is enough: its batch needs the rows of a request side by side."""
    give(-4)
    before = sharing.acceptance()
    sharing.generate_all(prompts[:4], **LONG, frequency_penalty=0.5)
    assert set(added(sharing, before)["at_width"]) == {4}


def test_the_calibration_learns_from_shared_rows(
    sharing: Server,
    prompts: list[list[int]],
    expected: list[list[int]],
    folder: Path,
    give: Callable[..., None],
) -> None:
    """Drafts that are always right are worth their rows, however unsure the drafter was."""
    give(-4)
    sequences = [ids + answer for ids, answer in zip(prompts, expected, strict=False)]
    (folder / "answers.json").write_text(json.dumps(sequences))
    before = after = sharing.state()["sglang_dflash"]["width"]["shared"]
    turns = itertools.count()
    with ThreadPoolExecutor(4) as pool:
        # requests that arrive far apart have no rows to share
        while after["steps"] <= before["steps"] + 20:
            turn = next(turns)
            assert turn < MOST_TURNS
            rids = [f"right15-{turn}-{i}" for i in range(4)]
            found = pool.map(lambda ids, rid: sharing.generate(ids, rid=rid, **LONG), prompts, rids)
            assert tokens(found) == expected[:4]
            after = sharing.state()["sglang_dflash"]["width"]["shared"]
    assert after["offsets"][0] > before["offsets"][0] + 0.5
    assert after["expected_tokens"] > before["expected_tokens"]


def test_drafts_after_steps_of_shared_rows_equal_the_oracle(
    sharing: Server,
    prompts: list[list[int]],
    expected: list[list[int]],
    folder: Path,
    oracle: tuple[Any, Drafter],
    give: Callable[..., None],
) -> None:
    """A request's committed rows lie anywhere among those of the batch: taken for another's, they
    would not change an answer, only make every later draft worse."""
    give(-3, 1, -2)
    rids = [f"record-shared-{i}" for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda ids, rid: sharing.generate(ids, rid=rid, **LONG), prompts, rids)
    for ids, rid, wanted, answer in zip(prompts, rids, expected, found, strict=False):
        assert answer["output_ids"] == wanted
        assert len(check_blocks(folder, rid, oracle, ids + wanted)) > 4
