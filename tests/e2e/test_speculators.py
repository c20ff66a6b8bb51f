"""Drafters in the speculators format: exact output, and the oracle's drafts block for block."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.reference import Drafter, generate
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import FULL_BLOCKS, SCRIPTED
from tests.tiny_models import VOCAB, load_target, make_speculators_drafter, make_target

NEW_TOKENS = 40
PROMPT_LENS = (3, 70, 33)

# family of the target, tokens of the drafter's own head, what else its config says. Gemma 4 scales
# its embedding, which this format does not
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "own head": ("gemma4", 300, {"sliding_window_non_causal": True}),
    "from anchor": ("qwen3", VOCAB, {"sample_from_anchor": True}),
}


class Pair:
    def __init__(self, kind: str, folder: Path) -> None:
        family, self.tokens, changes = KINDS[kind]
        self.folder = folder
        target = make_target(family, folder / "target")
        self.drafter = make_speculators_drafter(folder / "drafter", tokens=self.tokens, **changes)
        self.model = load_target(family, target)
        chance = random.Random(5)
        self.prompts = [[chance.randrange(3, VOCAB) for _ in range(n)] for n in PROMPT_LENS]
        self.server = Server(
            *(
                "--skip-tokenizer-init",
                "--chunked-prefill-size",
                "64",
                "--max-total-tokens",
                "4096",
            ),
            *("--model-path", str(target), "--speculative-draft-model-path", str(self.drafter)),
            env={"PYTHONPATH": SCRIPTED, "SCRIPT_FOLDER": str(folder), **FULL_BLOCKS},
        )


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    found = Pair(request.param, tmp_path_factory.mktemp("pair"))
    with found.server:
        yield found


def test_drafts_and_output_equal_the_oracle(pair: Pair) -> None:
    drafter = Drafter.from_pretrained(pair.drafter, dtype=torch.float32).eval()
    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    rids = [f"record-{i}" for i in range(len(pair.prompts))]
    served = pair.server.generate_all(pair.prompts, rids=rids, **params)
    lines = (pair.folder / "blocks.jsonl").read_text().splitlines()
    seen = set()
    for rid, prompt, answer in zip(rids, pair.prompts, served, strict=True):
        oracle = generate(pair.model, drafter, prompt, max_new_tokens=NEW_TOKENS)
        assert answer["output_ids"] == oracle.token_ids
        blocks = [block for line in lines if (block := json.loads(line))["rid"] == rid]
        # with overlap scheduling one more step has started when the last token is known
        assert len(blocks) <= len(oracle.blocks) + 1
        assert [(b["start"], tuple(b["drafts"])) for b in blocks[: len(oracle.blocks)]] == [
            (b.start, b.token_ids[1:]) for b in oracle.blocks
        ]
        seen |= {token for block in oracle.blocks for token in block.token_ids[1:]}
    assert len(seen) > 20


def test_sampled_requests_are_answered(pair: Pair) -> None:
    """Their drafts come from the same head, spread over the target's vocabulary."""
    found = pair.server.generate_all(pair.prompts, max_new_tokens=20, temperature=1.0)
    assert all(answer["output_ids"] for answer in found)
    assert pair.server.acceptance()["histogram"]
