"""Two ranks of other targets and drafters than the embedded pair: as transformers answers, and as
plain torch drafts.

Which drafter goes with which target does not matter: every pair covers a kind of each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.reference import Drafter, generate, generate_plain
from sglang_dflash.testing.server import SCHEDULES, Server
from tests.e2e.conftest import FULL_BLOCKS, SCRIPTED, TWO_CORES, start_together
from tests.tiny_configs import VOCAB
from tests.tiny_models import load_target, make_drafter, make_target

NEW_TOKENS = 31  # one from prefill, then thirty
PROMPT_LENS = (3, 70, 150, 64)
# target -> its server's arguments, and what its drafter has that two ranks cannot divide
PAIRS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    # both ranks run the whole drafter
    "gemma4-for-two": ((), {"num_attention_heads": 3, "num_key_value_heads": 1}),
    # both ranks hold the one KV head of the drafter; each has half of the target's experts
    "qwen3-moe": (("--ep-size", "2"), {"num_key_value_heads": 1}),
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks of a CPU")


class Pair:
    """A target and its drafter on two ranks, and transformers' answers."""

    def __init__(self, name: str, folder: Path) -> None:
        args, changes = PAIRS[name]
        self.folder = folder
        target = make_target(name, folder / "target")
        drafter = make_drafter(folder / "drafter", **changes)
        self.model = load_target(name, target)
        self.drafter = Drafter.from_pretrained(drafter, dtype=torch.float32).eval()
        chance = random.Random(5)
        self.prompts = [
            [chance.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENS
        ]
        self.answers = [
            generate_plain(self.model, prompt, max_new_tokens=NEW_TOKENS) for prompt in self.prompts
        ]
        sequences = [p + a for p, a in zip(self.prompts, self.answers, strict=True)]
        (folder / "answers.json").write_text(json.dumps(sequences))
        self.server = Server(
            *("--skip-tokenizer-init", "--chunked-prefill-size", "64"),
            *("--max-total-tokens", "4096", "--tp-size", "2", *args),
            *("--model-path", str(target), "--speculative-draft-model-path", str(drafter)),
            env={
                "PYTHONPATH": SCRIPTED,
                "SCRIPT_FOLDER": str(folder),
                **TWO_CORES,
                **SCHEDULES["plan stream"],
                **FULL_BLOCKS,
                "SPLIT_PRODUCTS": "1",
            },
        )

    def ask(self, kind: str) -> list[dict[str, Any]]:
        """Send all prompts at once, with a scripted drafter."""
        return self.server.generate_all(
            self.prompts,
            rids=[f"{kind}-{i}" for i in range(len(self.prompts))],
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
        )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    found = {name: Pair(name, tmp_path_factory.mktemp(name)) for name in PAIRS}
    start_together(*(pair.server for pair in found.values()))
    yield found
    for pair in found.values():
        pair.server.stop()


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


def test_right_drafts_are_taken_on_both_ranks(pair: Pair) -> None:
    found = pair.ask("right14")
    assert [answer["output_ids"] for answer in found] == pair.answers
    assert [answer["meta_info"]["spec_verify_ct"] for answer in found] == [2] * len(found)


def test_gemma_layers_are_fused_on_both_ranks(pairs: dict[str, Pair]) -> None:
    """Their answers are checked above. What is fused must not depend on the number of ranks."""
    layers = {name: pair.server.state()["sglang_dflash"]["layers"] for name, pair in pairs.items()}
    assert layers == {"gemma4-for-two": "sglang_dflash.torch", "qwen3-moe": "sglang"}


def test_both_ranks_draft_as_the_oracle_does(pair: Pair) -> None:
    """Ranks that cannot share a drafter have the same weights, features and draft KV, so that each
    drafts what a single one would."""
    found = pair.ask("record")
    assert [answer["output_ids"] for answer in found] == pair.answers
    lines = (pair.folder / "blocks.jsonl").read_text().splitlines()
    blocks = [json.loads(line) for line in lines]
    for i, prompt in enumerate(pair.prompts):
        oracle = generate(
            pair.model,
            pair.drafter,
            prompt,
            max_new_tokens=NEW_TOKENS,
            eos_token_ids=(),
            block_size=16,
        )
        served = [(b["start"], tuple(b["drafts"])) for b in blocks if b["rid"] == f"record-{i}"]
        for block in oracle.blocks:
            drafted = (block.start, block.token_ids[1:])
            assert [each for each in served if each[0] == block.start] == [drafted] * 2
        # with overlap scheduling one more step has started when the last token is known
        assert len(served) <= 2 * (len(oracle.blocks) + 1)
