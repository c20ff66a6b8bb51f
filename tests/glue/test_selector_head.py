"""Drafts of a selector: the oracle's path, and committed tokens distributed as plain decoding's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.glue.cpu import products
from sglang_dflash.glue.models.dflash2_model import (
    BlockConvolution,
    CandidateSelector,
    DFlash2DraftModel,
)
from sglang_dflash.glue.models.heads import Drafted, DraftHead
from sglang_dflash.glue.models.selector_head import SelectorHead
from sglang_dflash.kernels import TORCH, Noise
from sglang_dflash.kernels.logits.reference import capped, gumbel, gumbel_at
from sglang_dflash.reference import Drafter
from sglang_dflash.reference import dflash2 as oracle
from sglang_dflash.types import Randomness
from tests.glue import test_head
from tests.glue.test_distribution import CASES, Toy, exact_pairs, p_value
from tests.glue.test_draft_model import build, checkpoint
from tests.glue.test_graph_end import captured, noise_source
from tests.tiny_models import make_dflash2_drafter

HIDDEN, VOCAB, BLOCK = 24, 50, 4
SETTINGS = DFlash2(
    conv_taps=2,
    conv_group_size=8,
    selector_rank=6,
    selector_top_k=5,
    output_multiplier=0.5,
    logit_cap=4.0,
)


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights need a server's settings."""
    monkeypatch.setattr(products, "multiply", lambda _x, _weight: None)


def make_pair(
    vocab: int = VOCAB, *, dtype: torch.dtype = torch.float32, logit_cap: float = 0.0
) -> tuple[SelectorHead, oracle.CandidateSelector, nn.Linear]:
    """Return a head, the oracle's selector with the same weights, and the target's head."""
    torch.manual_seed(0)
    judge = oracle.CandidateSelector(SETTINGS, hidden_size=HIDDEN, vocab_size=vocab)
    served = CandidateSelector(SETTINGS, hidden_size=HIDDEN, vocab_size=vocab)
    for parameter in judge.requires_grad_(False).parameters():
        parameter.normal_(std=0.8)
    served.load_state_dict(judge.state_dict())
    # with padding of the vocabulary
    lm_head = nn.Linear(HIDDEN, vocab + 4, bias=False).requires_grad_(False).to(dtype)
    lm_head.weight.normal_(std=0.5)
    head = DraftHead(SimpleNamespace(lm_head=lm_head), vocab, TORCH)
    found = SelectorHead(head, served.to(dtype), block_size=BLOCK, logit_cap=logit_cap)
    return found, judge, lm_head


def noise(requests: int, *scales: float) -> Noise:
    keys = torch.empty(requests, BLOCK, dtype=torch.int64).random_()
    return Noise(keys, torch.tensor(scales or (0.9,)).expand(requests).contiguous())


@torch.no_grad()
@pytest.mark.parametrize("wanted", [3, 1])
def test_each_draft_follows_the_one_before_it_as_in_the_oracle(wanted: int) -> None:
    head, judge, lm_head = make_pair()
    hidden, anchors = torch.randn(3 * BLOCK, HIDDEN), torch.tensor([7, 0, 49])
    randomness = noise(3, 0.9, 0.0, 2.0)
    found = head.draft_blocks(
        hidden, randomness, wanted=wanted, with_confidence=True, anchors=anchors
    )
    assert found.drafts.shape == (2, 3, wanted)
    assert found.logits is not None and found.confidence is not None
    assert found.logits.shape == (3, wanted, VOCAB)
    for b, rows in enumerate(hidden.unflatten(0, (3, BLOCK))[:, 1 : wanted + 1]):
        best = drawn = int(anchors[b])
        for at, row in enumerate(rows):
            unary = lm_head(row)[:VOCAB]
            scores = judge.after(best, unary, row)
            best = int(scores.argmax())
            assert int(found.drafts[0, b, at]) == best
            torch.testing.assert_close(found.confidence[b, at], scores.softmax(-1).amax())
            scores = judge.after(drawn, unary, row)
            # the target samples with the same noise
            added = gumbel(randomness.keys[b, at : at + 1], VOCAB)[0]
            drawn = int((scores + randomness.scales[b] * added).argmax())
            assert int(found.drafts[1, b, at]) == drawn
            torch.testing.assert_close(found.logits[b, at].softmax(-1), scores.softmax(-1))
            assert (found.logits[b, at].isfinite() == scores.isfinite()).all()
    assert torch.equal(found.drafts[0, 1], found.drafts[1, 1])
    greedy = head.draft_blocks(hidden, None, wanted=wanted, anchors=anchors)
    assert torch.equal(greedy.drafts, found.drafts[:1]) and greedy.logits is None


@torch.no_grad()
def test_drafts_are_drawn_from_what_is_handed_over() -> None:
    """In bf16 scores are rounded, and a target's cap changes them: both before drafts are drawn."""
    times = 20_000
    head, _, _ = make_pair(dtype=torch.bfloat16, logit_cap=1.5)
    hidden = torch.randn(BLOCK, HIDDEN).repeat(times, 1).bfloat16()
    found = head.draft_blocks(hidden, noise(times), wanted=2, anchors=torch.full((times,), 3))
    assert found.logits is not None and found.logits.dtype == torch.bfloat16
    q = (capped(found.logits, 1.5) / 0.9).softmax(-1)
    first = torch.bincount(found.drafts[1, :, 0], minlength=VOCAB)
    assert p_value(first, q[0, 0].double()) > 1e-3
    for token in first.topk(2).indices:
        after = found.drafts[1, :, 0] == token
        second = torch.bincount(found.drafts[1, after, 1], minlength=VOCAB)
        assert p_value(second, q[after][0, 1].double()) > 1e-3


class SelectorToy(Toy):
    """Chains whose drafts a selector chooses."""

    def __init__(self, options: dict[str, float]) -> None:
        super().__init__(None, options)
        self.head, judge, _ = make_pair(self.logits.shape[0])
        # the target's own transitions, roughly
        left, size, right = self.logits.svd()
        rank = SETTINGS.selector_rank
        selector = self.head._selector
        selector.hidden_projection.weight.fill_(1 / HIDDEN)
        selector.predecessor_codebook.copy_(left[:, :rank] * size[:rank])
        selector.successor_codebook.copy_(right[:, :rank])
        self.hidden = torch.ones(BLOCK, HIDDEN) + 0.05 * torch.randn(BLOCK, HIDDEN)

    @torch.no_grad()
    def chain(self, anchors: Tensor, randomness: Randomness | None) -> tuple[Tensor, ...]:
        drawn = None if randomness is None else Noise(randomness.keys, randomness.scales)
        rows = self.hidden.repeat(len(anchors), 1)
        found = self.head.draft_blocks(rows, drawn, wanted=BLOCK - 1, anchors=anchors)
        return found.drafts[-1], found.logits  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["temperature 1", "top_k 8, top_p 0.9"])
@torch.no_grad()
def test_committed_tokens_are_distributed_as_plain_decodings(name: str) -> None:
    """The selector proposes some tokens only, each depending on the draft before it; whole blocks
    are then accepted or rejected against exactly these distributions."""
    toy = SelectorToy(CASES[name])
    assert p_value(toy.pairs(), exact_pairs(toy.logits, CASES[name])) > 1e-3


def test_the_end_of_a_graph_leaves_drafts_and_their_distribution() -> None:
    head, _, _ = make_pair()
    hidden, randomness = torch.randn(2 * BLOCK, HIDDEN), noise_source(2)
    randomness.for_batch(2).scales.fill_(5.0)
    ids = torch.arange(2 * BLOCK)
    runner: Any = SimpleNamespace(device="cpu", capture_tail_hooks=[])
    graphs = captured(runner, head, hidden, randomness, 2, input_ids=ids)
    drawn = randomness.for_batch(2)
    found = graphs.drafts_of(SimpleNamespace(can_run_graph=True), 2, drawn)
    with torch.inference_mode():
        expected = head.draft_blocks(
            hidden, drawn, wanted=3, with_confidence=True, anchors=ids[::BLOCK]
        )
    assert found is not None
    for one, two in zip(found, expected, strict=True):
        assert one is not None and two is not None and torch.equal(one, two)
    assert not torch.equal(found.drafts[0], found.drafts[1])


def test_ranks_choose_as_one_with_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, vocab = test_head.HIDDEN, test_head.VOCAB
    selector = CandidateSelector(SETTINGS, hidden_size=hidden, vocab_size=vocab)
    for parameter in selector.requires_grad_(False).parameters():
        parameter.normal_()
    weight, rows, drawn = torch.randn(vocab, hidden), torch.randn(6, hidden), noise(2, 5.0)

    def ask(head: DraftHead) -> tuple[Drafted, Drafted, bool]:
        found = SelectorHead(head, selector, block_size=BLOCK, logit_cap=0.0)
        how = {"wanted": 3, "anchors": torch.tensor([1, 2]), "with_confidence": True}
        return found.draft(rows, None, **how), found.draft(rows, drawn, **how), found.may_end_graphs

    _, whole, may_end_graphs = ask(
        test_head.draft_head(nn.Embedding(vocab, hidden, _weight=weight))
    )
    assert may_end_graphs and not torch.equal(whole.drafts[0], whole.drafts[1])
    for greedy, sampled, may_end_graphs in test_head.on_two_ranks(monkeypatch, weight, ask):
        assert torch.equal(greedy.drafts[0], whole.drafts[0]) and greedy.logits is None
        assert torch.equal(sampled.drafts, whole.drafts)
        torch.testing.assert_close(sampled.logits, whole.logits)
        torch.testing.assert_close(sampled.confidence, whole.confidence)
        # a graph would leave one rank's logits only
        assert not may_end_graphs


def test_noise_of_some_columns_is_that_of_all() -> None:
    keys, columns = torch.empty(3, dtype=torch.int64).random_(), torch.randint(90, (3, 7))
    assert torch.equal(gumbel_at(keys, columns), gumbel(keys, 90).gather(1, columns))


@torch.no_grad()
def test_a_convolution_is_the_oracles() -> None:
    torch.manual_seed(0)
    settings = DFlash2(conv_taps=3, conv_group_size=8, selector_rank=1, selector_top_k=1)
    judge = oracle.BlockConvolution(settings, HIDDEN)
    judge.base_kernel.normal_()
    for size in (5, 2):
        served = BlockConvolution(settings, hidden_size=HIDDEN, block_size=size)
        served.load_state_dict(judge.state_dict())
        x, sublayer = torch.randn(4 * size, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        into, kept = served.before(x)
        expected = judge.around(sublayer, x[None], block_size=size)[0]
        torch.testing.assert_close(served.after(sublayer(into), kept), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_loads_all_of_it(tmp_path: Path, rank: int) -> None:
    folder = make_dflash2_drafter(tmp_path / "drafter")
    model = build(2, rank, AutoConfig.from_pretrained(folder), DFlash2DraftModel)
    weights = checkpoint(folder)
    assert weights.keys() == Drafter.from_pretrained(folder).state_dict().keys()
    model.load_weights(weights.items())
    own = {n: p for n, p in model.named_parameters() if "_conv." in n or "selector" in n}
    assert len(own) == 2 * 2 * 2 + 3
    for name, parameter in own.items():
        assert torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("candidate_selector.successor_codebook", None, "missing .*successor_codebook"),
        ("candidate_selector.successor_codebook", (1024, 4), r"has shape \[1024, 4\]"),
        ("layers.1.mlp_conv.base_kernel", (2, 3, 128), r"base_kernel .* has shape \[2, 3, 128\]"),
    ],
)
def test_wrong_weights_are_told(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, told: str
) -> None:
    folder = make_dflash2_drafter(tmp_path / "drafter")
    weights = checkpoint(folder)
    if shape is None:
        del weights[name]
    else:
        weights[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=told):
        build(1, 0, AutoConfig.from_pretrained(folder), DFlash2DraftModel).load_weights(
            weights.items()
        )
