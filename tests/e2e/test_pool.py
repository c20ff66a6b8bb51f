"""A KV pool so small that requests are retracted and start again."""

from __future__ import annotations

import requests

from server import Server

POOL = 640


def test_retracted_requests_answer_as_if_nothing_happened(
    plain: Server, prompts: list[list[int]]
) -> None:
    params = {"max_new_tokens": 150, "ignore_eos": True}
    expected = [answer["output_ids"] for answer in plain.generate_all(prompts[:8], **params)]
    with Server("--context-length", "512", "--max-total-tokens", str(POOL)) as server:
        found = [answer["output_ids"] for answer in server.generate_all(prompts[:8], **params)]
        assert found == expected
        assert "Retract requests" in server.log()
        assert requests.post(f"{server.url}/flush_cache", timeout=30).ok
        assert server.state()["sglang_dflash"]["free_kv_slots"] == POOL
        assert "leak" not in server.log().lower()
