"""The experts of each token, as RL trainers ask for them."""

from __future__ import annotations

import base64
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from sglang_dflash.testing.server import SCHEDULES, Server
from tests.e2e.conftest import SCRIPTED, start_together
from tests.tiny_configs import VOCAB
from tests.tiny_models import make_gpt_oss_drafter, make_target

EXPERTS = ("--enable-return-routed-experts", "--max-running-requests", "8")
SHAPE = ("--skip-tokenizer-init", "--max-total-tokens", "4096", "--chunked-prefill-size", "128")
PROMPT, NEW_TOKENS = 40, 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("experts")
    return make_target("gpt-oss", folder / "target"), make_gpt_oss_drafter(folder / "drafter")


@pytest.fixture(scope="module")
def servers(folders: tuple[Path, Path]) -> Iterator[list[Server]]:
    """Plain decoding, and DFLASH with overlap scheduling, where SGLang copies experts later."""
    if torch.cuda.is_available():
        pytest.skip("experts in plain torch read sizes on the host: not in a CUDA graph")
    target, drafter = folders
    common = (*SHAPE, *EXPERTS, "--model-path", str(target))
    env = {"PYTHONPATH": SCRIPTED, "PAGEABLE_HOST": "1"}
    started = start_together(
        Server(*common, plain=True, env=env),
        Server(
            *common,
            *("--speculative-draft-model-path", str(drafter)),
            env=env | SCHEDULES["plan stream"],
        ),
    )
    yield started
    for server in started:
        server.stop()


def ask(server: Server, prompt: list[int]) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "return_routed_experts": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    return requests.post(f"{server.url}/generate", json=body, timeout=300).json()


def experts_of(answer: dict[str, Any]) -> array[int]:
    return array("i", base64.b64decode(answer["meta_info"]["routed_experts"]))


def test_each_tokens_experts_are_those_of_plain_decoding(servers: list[Server]) -> None:
    """Those of generated tokens were once what an earlier request had left in their slots."""
    chance = random.Random(3)
    for _ in range(4):
        prompt = [chance.randrange(3, VOCAB) for _ in range(PROMPT)]
        plain, dflash = (ask(server, prompt) for server in servers)
        assert dflash["output_ids"] == plain["output_ids"]
        assert experts_of(dflash) == experts_of(plain)
        assert len(experts_of(plain)) % (PROMPT + NEW_TOKENS - 1) == 0
