"""Drafters in the speculators format: exact output, and the oracle's drafts block for block."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.commands.convert import convert
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.reference import Drafter, generate
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import FULL_BLOCKS, SCRIPTED, assert_drafted
from tests.tiny_configs import VOCAB
from tests.tiny_models import load_target, make_speculators_drafter, make_target

NEW_TOKENS = 40
PROMPT_LENS = (3, 70, 33)


class Pair:
    """A random pair that uses all that this format has beyond the other, or a trained one."""

    def __init__(self, kind: str, folder: Path, prompts: list[list[int]]) -> None:
        self.is_trained, self.folder = kind == "trained", folder
        self.model: PreTrainedModel
        if self.is_trained:
            target, self.drafter = tiny_target(), shrink_tiny_drafter(folder / "drafter")
            self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
            self.prompts = prompts[:3]
        else:
            # Gemma 4 scales its embedding, which this format does not
            target = make_target("gemma4", folder / "target")
            switches = {"sliding_window_non_causal": True, "sample_from_anchor": True}
            self.drafter = make_speculators_drafter(folder / "drafter", tokens=300, **switches)
            self.model = load_target("gemma4", target)
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


def shrink_tiny_drafter(folder: Path) -> Path:
    """Write the tiny pair's drafter in this format, with a head for six of every seven tokens."""
    convert(tiny_drafter(), folder, target=str(tiny_target()))
    path = folder / "model.safetensors"
    # its head is its embedding
    head = load_file(tiny_target() / "model.safetensors")["model.embed_tokens.weight"]
    is_drafted = torch.arange(len(head)) % 7 != 3
    tokens = is_drafted.nonzero().flatten()
    own = {"lm_head.weight": head[tokens], "t2d": is_drafted}
    own["d2t"] = tokens - torch.arange(len(tokens))
    save_file({**load_file(path), **own}, path)
    config = json.loads((folder / "config.json").read_text())
    config["draft_vocab_size"] = len(tokens)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["trained", "random"])
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
) -> Iterator[Pair]:
    found = Pair(request.param, tmp_path_factory.mktemp("pair"), prompts)
    with found.server:
        yield found


def test_drafts_and_output_equal_the_oracle(pair: Pair) -> None:
    drafter = Drafter.from_pretrained(pair.drafter, dtype=torch.float32).eval()
    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    rids = [f"record-{i}" for i in range(len(pair.prompts))]
    served = pair.server.generate_all(pair.prompts, rids=rids, **params)
    seen = set()
    for rid, prompt, answer in zip(rids, pair.prompts, served, strict=True):
        oracle = generate(pair.model, drafter, prompt, max_new_tokens=NEW_TOKENS)
        assert answer["output_ids"] == oracle.token_ids
        assert_drafted(pair.folder, rid, oracle)
        seen |= {token for block in oracle.blocks for token in block.token_ids[1:]}
        assert not pair.is_trained or max(oracle.commit_lens) > 2
    assert len(seen) > 20


def test_sampled_drafts_are_accepted(pair: Pair) -> None:
    """They come from the same head, spread over the target's vocabulary. Which tokens are then
    committed is tested in tests/glue/test_distribution.py."""
    before = pair.server.acceptance()["accepted_tokens"]
    found = pair.server.generate_all(pair.prompts, max_new_tokens=30, temperature=1.0)
    assert all(answer["output_ids"] for answer in found)
    accepted = pair.server.acceptance()["accepted_tokens"] - before
    assert accepted > 5 or not pair.is_trained
