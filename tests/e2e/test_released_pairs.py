"""Targets and drafters that are released together, each kind of which is tested with another.

Random tiny pairs: exact output, and the oracle's drafts block for block.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sglang_dflash.glue import seams
from sglang_dflash.reference import Drafter, generate
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import SCRIPTED, assert_drafted
from tests.e2e.test_dflash2 import translate
from tests.e2e.test_families import HYBRID
from tests.tiny_configs import VOCAB
from tests.tiny_models import (
    load_target,
    make_dflash2_drafter,
    make_speculators_drafter,
    make_target,
)

NEW_TOKENS = 40
PROMPT_LENS = (70, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3-moe", "speculators"),
        ("qwen3.5-moe", "speculators"),
        ("qwen3.5-vision", "dflash2"),
        ("gemma4", "dflash2 in speculators"),
    ],
)
def test_drafts_and_output_equal_the_oracle(tmp_path: Path, family: str, kind: str) -> None:
    if family in HYBRID and not seams.chooses_snapshots:
        pytest.skip("refused with this release of SGLang")
    if torch.cuda.is_available():
        pytest.skip("SGLang's experts and linear attention in torch are for a CPU")
    target = make_target(family, tmp_path / "target")
    if kind == "speculators":
        folder = make_speculators_drafter(tmp_path / "drafter", tokens=300)
    else:
        folder = make_dflash2_drafter(tmp_path / "drafter")
    if kind == "dflash2 in speculators":
        translate(folder)
    model, drafter = load_target(family, target), Drafter.from_pretrained(folder).eval()
    size = drafter.config.block_size
    chance = random.Random(5)
    prompts = [[chance.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENS]
    states = ("--max-mamba-cache-size", "64") if family in HYBRID else ()
    with Server(
        *("--skip-tokenizer-init", "--chunked-prefill-size", "64", "--max-total-tokens", "4096"),
        *("--model-path", str(target), "--speculative-draft-model-path", str(folder)),
        *states,
        env={
            "PYTHONPATH": SCRIPTED,
            "SCRIPT_FOLDER": str(tmp_path),
            "SGLANG_DFLASH_WIDTH": str(size),
        },
    ) as server:
        rids = [f"record-{i}" for i in range(len(prompts))]
        params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        served = server.generate_all(prompts, rids=rids, **params)
    for rid, prompt, answer in zip(rids, prompts, served, strict=True):
        oracle = generate(
            model,
            drafter,
            prompt,
            max_new_tokens=NEW_TOKENS,
            eos_token_ids=(),
            block_size=size,
        )
        assert answer["output_ids"] == oracle.token_ids
        assert_drafted(tmp_path, rid, oracle)
