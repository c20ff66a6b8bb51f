"""KV pages of several slots, which only GPU backends have, give the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_dflash.testing.server import Server
from tests.e2e.conftest import SHAPE, start_together

pytestmark = pytest.mark.gpu

PAGE = ("--page-size", "16")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    pair = start_together(Server(*SHAPE, *PAGE, plain=True), Server(*SHAPE, *PAGE))
    yield pair[0], pair[1]
    for server in pair:
        server.stop()


def test_pages_of_sixteen_give_the_same_tokens(
    servers: tuple[Server, Server], prompts: list[list[int]]
) -> None:
    """Lengths on both sides of a page boundary, all at once, then again from the prefix cache."""
    plain, dflash = servers
    asked = [prompt + [7] * extra for extra, prompt in enumerate(prompts[:20])]
    expected = [plain.generate(ids, max_new_tokens=80, ignore_eos=True) for ids in asked]
    for _ in range(2):
        found = dflash.generate_all(asked, max_new_tokens=80, ignore_eos=True)
        assert [a["output_ids"] for a in found] == [a["output_ids"] for a in expected]
    assert any(answer["meta_info"]["cached_tokens"] for answer in found)
