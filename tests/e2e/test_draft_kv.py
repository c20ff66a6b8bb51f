"""Draft KV in a type of its own."""

from __future__ import annotations

import re

import pytest
import torch

from sglang_dflash.glue import release
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import FULL_BLOCKS, SHAPE

pytestmark = [
    pytest.mark.skipif(release.installed() == "0.5.17", reason="it has no such option"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 beside bf16, as on a CPU"),
]


def test_draft_kv_may_have_another_type_than_the_targets(
    plain: Server, prompts: list[list[int]]
) -> None:
    """What a drafter reads changes its drafts, never an answer."""
    params = {"max_new_tokens": 60}
    expected = [answer["output_ids"] for answer in plain.generate_all(prompts[:12], **params)]
    option = ("--speculative-draft-kv-cache-dtype", "bf16")
    with Server(*SHAPE, *option, env=FULL_BLOCKS) as server:
        found = server.generate_all(prompts[:12], **params)
        allocated = re.findall(r"KV Cache is allocated\. dtype: (\S+),", server.log())
        accept_length = server.acceptance()["accept_length"]
    assert [answer["output_ids"] for answer in found] == expected
    assert allocated == ["torch.float32", "torch.bfloat16"]
    assert accept_length > 1.8
