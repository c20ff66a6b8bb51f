"""The parts of disaggregation that need no second server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.glue import seams
from sglang_dflash.glue.step import disaggregation


class Pool:
    """A draft KV pool of one number per slot."""

    def __init__(self, slots: int) -> None:
        self.kv = torch.zeros(slots)

    def get_cpu_copy(self, slots: torch.Tensor) -> torch.Tensor:
        return self.kv[slots].clone()

    def load_cpu_copy(self, copy: torch.Tensor, slots: torch.Tensor) -> None:
        self.kv[slots] = copy


class Request:
    """A request of four tokens, the last of which has no KV yet."""

    seqlen = 4


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(disaggregation, "_draft_kv", [])
    pool = Pool(slots=12)
    # 32 ranks cannot share the drafter
    disaggregation.transfer(pool, target_kv_heads=8, shards=lambda size: size if size < 32 else 1)
    return pool


def test_a_retracted_request_gets_its_draft_kv_back_in_other_slots(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would go on with the draft KV of whoever had its new slots."""
    monkeypatch.setattr(seams, "row_of", lambda req: 1, raising=False)
    slots = SimpleNamespace(req_to_token=torch.tensor([[0] * 5, [3, 4, 5, 6, 0]]))
    done: list[str] = []
    req = Request()
    pool.kv[3:7] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    disaggregation.back_up(lambda *given: done.append("backed up"), req, slots, "allocator")
    pool.kv[3:12] = 9.0
    slots.req_to_token[1] = torch.tensor([11, 8, 10, 9, 0])
    disaggregation.restore(lambda *given: done.append("restored"), req, slots, "allocator")
    assert pool.kv.tolist() == [0.0] * 3 + [9.0] * 5 + [2.0, 9.0, 3.0, 1.0]
    assert done == ["backed up", "restored"]


def manager(ranks: int, *item_lens: int, is_mla: bool = False) -> Any:
    kv_args = SimpleNamespace(kv_item_lens=list(item_lens))
    return SimpleNamespace(attn_tp_size=ranks, is_mla_backend=is_mla, kv_args=kv_args)


def match(kv_manager: Any, prefill_ranks: int) -> None:
    prefill = SimpleNamespace(attn_tp_size=prefill_ranks)
    disaggregation.match_ranks(lambda *given: None, kv_manager, prefill)


@pytest.mark.parametrize(
    ("kv_manager", "prefill_ranks", "reason"),
    [
        pytest.param(manager(2, 512, 512, 256), 1, r"differ in bytes \(\[256, 512\]\)", id="bytes"),
        pytest.param(manager(2, 512, is_mla=True), 1, "all of the target's", id="mla"),
        pytest.param(manager(4, 512, 512), 16, "8 KV heads, which some", id="shared heads"),
        pytest.param(manager(4, 512, 512), 32, "every rank has all of it", id="whole drafter"),
    ],
)
def test_ranks_between_which_draft_kv_cannot_be_cut_are_refused(
    pool: Pool, kv_manager: Any, prefill_ranks: int, reason: str
) -> None:
    """SGLang cuts every buffer like the target's, and would write past the drafter's."""
    asked = f"has --tp-size {prefill_ranks} and this decode server {kv_manager.attn_tp_size},"
    with pytest.raises(RuntimeError, match=f"{asked}.*{reason}.*Start both with the same size"):
        match(kv_manager, prefill_ranks)


@pytest.mark.parametrize(
    ("kv_manager", "prefill_ranks"),
    [
        pytest.param(manager(4, 512, 512), 2, id="cut alike"),
        pytest.param(manager(2, 512, 256), 2, id="as many ranks"),
        pytest.param(manager(16, 512, is_mla=True), 16, id="as many ranks, mla"),
    ],
)
def test_other_ranks_are_matched(pool: Pool, kv_manager: Any, prefill_ranks: int) -> None:
    match(kv_manager, prefill_ranks)


def test_without_dflash_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "_draft_kv", [])
    match(manager(2, 512, 256), 1)
