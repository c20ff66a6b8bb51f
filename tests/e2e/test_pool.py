"""Requests in a small KV pool (retraction) and in few request slots (admission)."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks import batch_load
from sglang_dflash.testing.server import SCHEDULES, Server

POOL = 640
# SGLang's own switch: a full pool depends on timing, retracting every seventh step does not
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


def test_retracted_requests_answer_as_if_nothing_happened(
    plain: Server, prompts: list[list[int]], schedule: str
) -> None:
    params = {"max_new_tokens": 150, "ignore_eos": True}
    expected = [answer["output_ids"] for answer in plain.generate_all(prompts[:8], **params)]
    env = SCHEDULES[schedule] | RETRACT
    with Server("--context-length", "512", "--max-total-tokens", str(POOL), env=env) as server:
        found = [answer["output_ids"] for answer in server.generate_all(prompts[:8], **params)]
        assert found == expected
        retracted = re.findall(r"#retracted_reqs: (\d+)", server.log())
        assert sum(map(int, retracted)) >= 3
        server.flush_cache()
        assert server.state()["sglang_dflash"]["free_kv_slots"] == POOL
        assert "leak" not in server.log().lower()


def test_no_request_waits_beside_an_empty_slot(prompts: list[list[int]]) -> None:
    """In-tree DFLASH admits only while several slots are free, so the last ones stay empty."""
    context = ("--context-length", "512", "--max-total-tokens", "8192")
    with (
        Server(*context, "--max-running-requests", "8") as server,
        ThreadPoolExecutor(7) as pool,
    ):
        long = [
            pool.submit(server.generate, ids, max_new_tokens=460, ignore_eos=True)
            for ids in prompts[:7]
        ]
        while batch_load.ran_together(server.log()) < 7:
            assert not any(future.done() for future in long)
            time.sleep(0.02)
        server.generate(prompts[7], max_new_tokens=4, ignore_eos=True)
        assert not any(future.done() for future in long)
