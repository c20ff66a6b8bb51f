"""The output is the same whatever the drafter does, and acceptance is as constructed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.reference import Drafter, generate
from sglang_dflash.reference.generate import recompute_context
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import assert_drafted

NEW_TOKENS = 97


@pytest.fixture(scope="module")
def answers(plain: Server, prompts: list[list[int]], script_folder: Path) -> list[list[int]]:
    """Full token sequences of plain decoding, also given to the scripted drafter."""
    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    found = plain.generate_all(prompts[:8], **params)
    sequences = [ids + answer["output_ids"] for ids, answer in zip(prompts, found, strict=False)]
    (script_folder / "answers.json").write_text(json.dumps(sequences))
    return sequences


def generate_as(server: Server, rid: str, ids: list[int]) -> dict:
    return server.generate(ids, rid=rid, max_new_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("num_right", [0, 1, 2, 7, 14, 15])
def test_drafter_right_up_to_k_commits_k_plus_one_tokens_a_step(
    scripted: Server, answers: list[list[int]], prompts: list[list[int]], num_right: int
) -> None:
    for i in range(2):
        found = generate_as(scripted, f"right{num_right}-{i}", prompts[i])
        assert prompts[i] + found["output_ids"] == answers[i]
        # prefill gives the first token, each step then adds num_right + 1
        steps = math.ceil((NEW_TOKENS - 1) / (num_right + 1))
        assert found["meta_info"]["spec_verify_ct"] == steps


@pytest.mark.parametrize("kind", ["wrong", "random", "nan", "inf"])
def test_useless_drafter_changes_nothing(
    scripted: Server, answers: list[list[int]], prompts: list[list[int]], kind: str
) -> None:
    for i in range(2):
        found = generate_as(scripted, f"{kind}-{i}", prompts[i])
        assert prompts[i] + found["output_ids"] == answers[i]
    if kind == "wrong":
        assert found["meta_info"]["spec_verify_ct"] == NEW_TOKENS - 1


def test_meter_equals_the_construction(
    scripted: Server, answers: list[list[int]], prompts: list[list[int]]
) -> None:
    """96 tokens after the first at three per step: 32 steps with two accepted drafts each."""
    before = scripted.acceptance()
    generate_as(scripted, "right2-meter", prompts[2])
    after = scripted.acceptance()
    added = [b - a for a, b in zip(before["histogram"], after["histogram"], strict=True)]
    assert added == [0, 0, 32] + [0] * 13


def test_blocks_and_draft_kv_equal_the_oracle(
    scripted: Server, prompts: list[list[int]], script_folder: Path
) -> None:
    """Compare every block with plain torch, over steps that commit many tokens, and the final
    draft KV with one recomputed from scratch."""
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).eval()
    drafter = Drafter.from_pretrained(tiny_drafter(), dtype=torch.float32).eval()
    for i in range(4):
        rid = f"record-{i}"
        served = generate_as(scripted, rid, prompts[i])["output_ids"]
        oracle = generate(
            target, drafter, prompts[i], max_new_tokens=NEW_TOKENS, eos_token_ids=(), block_size=16
        )
        assert served == oracle.token_ids
        assert max(oracle.commit_lens) > 2
        assert_drafted(script_folder, rid, oracle)
        check_draft_kv(script_folder / f"{rid}.pt", target, drafter, prompts[i] + served)


def check_draft_kv(path: Path, target, drafter, token_ids: list[int]) -> None:
    kept = torch.load(path, map_location="cpu")
    length = kept[0][0].shape[0]
    # the last step may have committed past max_new_tokens; compare the common prefix
    known = min(length, len(token_ids))
    context = recompute_context(target, drafter, token_ids[:known])
    for layer, (keys, values) in enumerate(kept):
        # fp32; summation order differs through 8 target layers and a projection
        torch.testing.assert_close(keys[:known], context.keys[layer][0], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(values[:known], context.values[layer][0], atol=2e-4, rtol=1e-4)
