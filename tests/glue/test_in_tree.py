"""Sampling parameters that SGLang's own DFLASH ignores or applies in another way, by its functions.

It does not serve on a CPU, but its arithmetic runs there. A test that fails here means that SGLang
has mended something: the table of both in docs/sampling.md must then be changed.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import dflash_utils, dflash_worker_v2
from torch import Tensor

from tests.glue.test_sampling import VOCAB as WIDE
from tests.glue.test_sampling import Batch, make_req

VOCAB = 5
# probabilities 0.5, 0.25, 0.15, 0.07 and 0.03
LOGITS = torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03]]).log()


def sampling_info(**changes: Any) -> SamplingBatchInfo:
    """Return one request that samples from the whole vocabulary, but for what is changed."""
    settings: dict[str, Any] = {
        "temperatures": torch.ones(1, 1),
        "top_ps": torch.ones(1),
        "top_ks": torch.tensor([VOCAB], dtype=torch.int32),
        "min_ps": torch.zeros(1),
        "is_all_greedy": False,
        "is_any_greedy": False,
        "need_top_p_sampling": False,
        "need_top_k_sampling": False,
        "need_min_p_sampling": False,
        "vocab_size": VOCAB,
        "device": "cpu",
    }
    return SamplingBatchInfo(**settings | changes)


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Return what a GPU's kernel does: the fewest tokens with that much probability, rescaled."""
    ranked, tokens = probs.sort(descending=True)
    before = ranked.cumsum(-1) - ranked
    kept = torch.where(before < top_ps[:, None], ranked, 0.0)
    return torch.zeros_like(probs).scatter(1, tokens, kept / kept.sum(-1, keepdim=True))


@pytest.fixture
def in_tree(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the probabilities that SGLang's DFLASH verifies a row with."""
    monkeypatch.setattr(dflash_utils, "top_p_renorm_prob", keep_top_p)
    found = inspect.getmembers(dflash_utils, inspect.isfunction)
    [build] = [f for name, f in found if name.endswith("_verify_target_probs")]

    def probabilities(info: SamplingBatchInfo) -> list[float]:
        rows = build(next_token_logits=LOGITS.clone(), sampling_info=info, draft_token_num=1, bs=1)
        return [round(value, 4) for value in rows.flatten().tolist()]

    return probabilities


def plain(monkeypatch: pytest.MonkeyPatch, info: SamplingBatchInfo) -> list[float]:
    """Return the probabilities that plain decoding samples with."""
    seen: list[Tensor] = []

    def sample(weights: Tensor, num_samples: int) -> Tensor:
        seen.append(weights)
        return torch.zeros(len(weights), num_samples, dtype=torch.int64)

    monkeypatch.setattr(torch, "multinomial", sample)
    top_k_top_p_min_p_sampling_from_probs_torch(
        LOGITS.softmax(-1),
        info.top_ks,
        info.top_ps,
        info.min_ps,
        info.need_min_p_sampling,
        None,
        torch.zeros(1),
    )
    [weights] = seen
    # the logits are sorted, so that the ranks are the tokens
    return [round(value, 4) for value in (weights / weights.sum()).flatten().tolist()]


def test_one_filter_alone_is_right(in_tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the tests below compare like with like."""
    top_k = sampling_info(top_ks=torch.tensor([3], dtype=torch.int32), need_top_k_sampling=True)
    top_p = sampling_info(top_ps=torch.tensor([0.7]), need_top_p_sampling=True)
    for info in (top_k, top_p):
        assert in_tree(info) == plain(monkeypatch, info)


def test_top_k_is_rescaled_before_top_p(in_tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info = sampling_info(
        top_ks=torch.tensor([3], dtype=torch.int32),
        top_ps=torch.tensor([0.8]),
        need_top_k_sampling=True,
        need_top_p_sampling=True,
    )
    # the first two have 0.75 of the whole, but 0.83 of the first three
    assert plain(monkeypatch, info) == [0.5556, 0.2778, 0.1667, 0.0, 0.0]
    assert in_tree(info) == [0.6667, 0.3333, 0.0, 0.0, 0.0]


def test_min_p_is_ignored(in_tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info = sampling_info(min_ps=torch.tensor([0.4]), need_min_p_sampling=True)
    assert plain(monkeypatch, info) == [0.6667, 0.3333, 0.0, 0.0, 0.0]
    assert in_tree(info) == [0.5, 0.25, 0.15, 0.07, 0.03]


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"frequency_penalty": 2.0}, penaltylib.BatchedFrequencyPenalizer),
        ({"presence_penalty": 2.0}, penaltylib.BatchedPresencePenalizer),
        ({"repetition_penalty": 2.0}, penaltylib.BatchedRepetitionPenalizer),
        ({"min_new_tokens": 4, "stop_token_ids": {3}}, penaltylib.BatchedMinNewTokensPenalizer),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_penalties_are_ignored_with_overlap_scheduling(asked: dict[str, Any], kind: Any) -> None:
    """The scheduler sums them into fields, for a step to apply; DFLASH reads another name."""
    batch = Batch([make_req(1, **asked)])
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(WIDE, batch, {kind})
    orchestrator.cumulate_output_tokens(torch.tensor([0]))
    info = sampling_info(penalizer_orchestrator=orchestrator, vocab_size=WIDE).copy_for_forward()
    logits = torch.randn(1, WIDE)
    expected, found = logits.clone(), logits.clone()
    info.apply_logits_bias(expected)
    assert not torch.equal(expected, logits)
    dflash_utils.apply_dflash_verify_logits_adjustments(
        next_token_logits=found, sampling_info=info, draft_token_num=1
    )
    assert torch.equal(found, logits)


def test_a_request_s_seed_is_ignored() -> None:
    sources = inspect.getsource(dflash_utils) + inspect.getsource(dflash_worker_v2)
    assert "sampling_seed" not in sources and "torch.rand(" in sources
