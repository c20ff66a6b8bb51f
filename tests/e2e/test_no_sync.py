"""A decode step never synchronises with the GPU: tests/plugins/sync_debug.py makes it an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_dflash.testing.server import Server
from tests.e2e.conftest import SHAPE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("plan_stream", ["0", "1"])
def test_a_decode_step_does_not_wait_for_the_device(
    prompts: list[list[int]], plan_stream: str
) -> None:
    env = {
        "NATIVE_OPS": "0",
        "SYNC_DEBUG": "1",
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": plan_stream,
    }
    # the deployed configuration: bf16, triton target, fa4 drafter
    half = (*SHAPE, "--dtype", "bfloat16", "--speculative-draft-attention-backend", "fa4")
    with Server(*half, env=env) as server:
        greedy, sampled = {"temperature": 0.0}, {"temperature": 1.0}
        filtered = sampled | {"top_p": 0.95, "top_k": 64}
        for kinds in ([greedy], [sampled], [filtered], [greedy, sampled, filtered]):
            mix = (kinds * 8)[:8]
            with ThreadPoolExecutor(8) as pool:
                found = pool.map(
                    lambda ids, params: server.generate(ids, max_new_tokens=60, **params),
                    prompts[:8],
                    mix,
                )
            assert all(answer["output_ids"] for answer in found)
        assert "overlap scheduling is on" in server.log()
