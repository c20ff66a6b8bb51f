"""Servers and prompts shared by the end-to-end tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.pairs.tiny_corpus.corpus import sample_prompts
from sglang_dflash.reference import Drafter
from sglang_dflash.testing.server import ROOT, SCHEDULES, Server
from tests.schedules import follows

# short context and small prefill chunks, so that tests reach both limits within seconds
SHAPE = ("--context-length", "512", "--chunked-prefill-size", "64", "--max-total-tokens", "8192")
SCRIPTED = str(ROOT / "tests" / "plugins")
# with a single NUMA node, SGLang must be told the cores of each rank or replica
TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
# so that a test can tell how many steps an answer takes
FULL_BLOCKS = {"SGLANG_DFLASH_WIDTH": "16"}
METERED_TOKENS = 61  # one from prefill, then sixty


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--schedules").split(",")
        usual = metafunc.definition.get_closest_marker("usual_schedule")
        if chosen == ["usual"]:
            chosen = [usual.args[0]] if usual else ["in turn", "plan stream"]
        if unknown := set(chosen) - set(SCHEDULES):
            raise pytest.UsageError(f"--schedules knows {list(SCHEDULES)}, not {sorted(unknown)}")
        metafunc.parametrize("schedule", chosen, scope="session")


def assert_drafted(folder: Path, rid: str, oracle: Any) -> None:
    """Compare the blocks that a server recorded for a request with the oracle's, one by one."""
    lines = (folder / "blocks.jsonl").read_text().splitlines()
    blocks = [block for line in lines if (block := json.loads(line))["rid"] == rid]
    # with overlap scheduling one more step has started when the last token is known
    assert len(blocks) <= len(oracle.blocks) + 1
    assert [(b["start"], tuple(b["drafts"])) for b in blocks[: len(oracle.blocks)]] == [
        (b.start, b.token_ids[1:]) for b in oracle.blocks
    ]


def start_together(*servers: Server) -> list[Server]:
    """Wait for servers that start concurrently; stop them all if one fails."""
    try:
        return [server.wait() for server in servers]
    except BaseException:
        for server in servers:
            server.stop()
        raise


@pytest.fixture(scope="session")
def plain() -> Iterator[Server]:
    """The embedded target without speculation."""
    with Server(*SHAPE, plain=True) as server:
        yield server


@pytest.fixture(scope="session")
def dflash(schedule: str) -> Iterator[Server]:
    """The embedded pair."""
    with Server(*SHAPE, env=SCHEDULES[schedule] | FULL_BLOCKS) as server:
        assert follows(server, schedule)
        yield server


@pytest.fixture(scope="session")
def script_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("script")


@pytest.fixture(scope="module")
def scripted(script_folder: Path) -> Iterator[Server]:
    """The embedded pair, with tests/plugins/scripted_drafter.py drafting for some requests."""
    env = {"PYTHONPATH": SCRIPTED, "SCRIPT_FOLDER": str(script_folder), **FULL_BLOCKS}
    with Server(*SHAPE, env=env) as server:
        yield server


@pytest.fixture(scope="session")
def oracle() -> tuple[Any, Drafter]:
    """Target and drafter in plain torch."""
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).eval()
    return target, Drafter.from_pretrained(tiny_drafter(), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def questions() -> list[str]:
    return sample_prompts(64, seed=7)


@pytest.fixture(scope="session")
def prompts(tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[list[int]]:
    """The questions as token ids, chat template applied."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in questions
    ]


@pytest.fixture(scope="session")
def metered_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="session")
def measured(plain: Server, prompts: list[list[int]], metered_folder: Path) -> Iterator[Server]:
    """A server with metrics whose scripted drafters know plain decoding's answers."""
    params = {"max_new_tokens": METERED_TOKENS + 20, "ignore_eos": True}
    answers = plain.generate_all(prompts[:8], **params)
    sequences = [p + a["output_ids"] for p, a in zip(prompts, answers, strict=False)]
    (metered_folder / "answers.json").write_text(json.dumps(sequences))
    env = {
        "PYTHONPATH": SCRIPTED,
        "SCRIPT_FOLDER": str(metered_folder),
        "SGLANG_DFLASH_ALARM_WINDOW": "50",
        **FULL_BLOCKS,
    }
    with Server(*SHAPE, "--enable-metrics", "--decode-log-interval", "10", env=env) as server:
        yield server
