"""A drafter's own head: loaded whole on every rank, its drafts are tokens of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_dflash.glue import compat
from sglang_dflash.glue.cpu import products
from sglang_dflash.glue.models.draft_model import DFlashDraftModel
from sglang_dflash.glue.models.embedding import unscaled
from sglang_dflash.glue.models.heads import BlockHead
from sglang_dflash.glue.models.own_head import OwnDraftHead
from sglang_dflash.glue.startup.drafter_format import read_config
from sglang_dflash.kernels import TORCH, Noise
from tests.glue.test_draft_model import as_rank, build, checkpoint
from tests.tiny_configs import HIDDEN, VOCAB
from tests.tiny_models import make_speculators_drafter

TOKENS = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_speculators_drafter(tmp_path / "drafter", tokens=TOKENS)


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights need a server's settings."""
    monkeypatch.setattr(products, "multiply", lambda _x, _weight: None)


def load(folder: Path, rank: int = 0, size: int = 1, **changes: Tensor) -> DFlashDraftModel:
    model = build(size, rank, read_config(str(folder), trust_remote_code=False))
    model.load_weights({**checkpoint(folder), **changes}.items())
    return model


def own_head(folder: Path) -> OwnDraftHead:
    own = load(folder).own_head
    assert own is not None
    return OwnDraftHead(own, VOCAB, TORCH)


def tokens_of(folder: Path) -> Tensor:
    return checkpoint(folder)["t2d"].nonzero().flatten()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_holds_all_of_it(folder: Path, rank: int) -> None:
    own = load(folder, rank, 2).own_head
    assert own is not None and torch.equal(own.tokens, tokens_of(folder))
    assert torch.equal(own.lm_head.weight, checkpoint(folder)["lm_head.weight"])


@torch.no_grad()
def test_drafts_are_tokens_of_the_target(folder: Path) -> None:
    """Greedy drafts, sampled drafts, and the logits that sampled ones are verified with."""
    torch.manual_seed(0)
    hidden = torch.randn(2 * 16, HIDDEN) * 3
    own, tokens = own_head(folder), tokens_of(folder)
    logits = hidden @ checkpoint(folder)["lm_head.weight"].T
    head = BlockHead(own, block_size=16, logit_cap=0.0)
    expected = tokens[logits.argmax(1)].view(2, 16)[:, 1:]
    greedy = head.draft_blocks(hidden, None, wanted=15, with_confidence=True)
    assert torch.equal(greedy.drafts[0], expected) and greedy.logits is None
    peaks = logits.softmax(1).amax(1).view(2, 16)[:, 1:]
    torch.testing.assert_close(greedy.confidence, peaks)
    noise = Noise(torch.empty(2, 16, dtype=torch.int64).random_(), torch.tensor([1.0, 0.0]))
    sampled = head.draft_blocks(hidden, noise, wanted=15)
    assert torch.equal(sampled.drafts[0], expected)
    assert torch.isin(sampled.drafts[1], tokens).all()
    assert not torch.equal(sampled.drafts[1, 0], expected[0])
    assert torch.equal(sampled.drafts[1, 1], expected[1])
    assert sampled.logits is not None and sampled.logits.shape == (2, 15, VOCAB)
    torch.testing.assert_close(sampled.logits[..., tokens], logits.view(2, 16, -1)[:, 1:])
    assert (sampled.logits.isfinite().sum(-1) == TOKENS).all()


@torch.no_grad()
@pytest.mark.parametrize("wanted", [15, 4])
def test_drafts_can_start_at_the_anchors_row(folder: Path, wanted: int) -> None:
    """Few drafts are read row by row, all of them from whole blocks."""
    torch.manual_seed(0)
    hidden = torch.randn(2 * 16, HIDDEN) * 3
    head = BlockHead(own_head(folder), block_size=16, logit_cap=0.0, from_anchor=True)
    logits = hidden @ checkpoint(folder)["lm_head.weight"].T
    expected = tokens_of(folder)[logits.argmax(1)].view(2, 16)[:, :wanted]
    noise = Noise(torch.empty(2, 16, dtype=torch.int64).random_(), torch.tensor([1.0, 0.7]))
    assert torch.equal(head.draft_blocks(hidden, None, wanted=wanted).drafts[0], expected)
    sampled = head.draft_blocks(hidden, noise, wanted=wanted).drafts
    rows = head.masked_rows(hidden, wanted)
    assert torch.equal(head.draft(rows, noise, wanted=wanted).drafts, sampled)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("d2t", torch.full((TOKENS,), -1), "does not name 300 different tokens of 1024"),
        ("d2t", torch.arange(TOKENS).flip(0), "does not name 300 different tokens of 1024"),
        ("d2t", torch.zeros(TOKENS + 1, dtype=torch.int64), r"d2t .* has shape \[301\]"),
        (
            "lm_head.weight",
            torch.zeros(VOCAB, HIDDEN),
            r"lm_head.weight .* has shape \[1024, 128\]",
        ),
    ],
)
def test_a_wrong_map_or_head_is_told(folder: Path, name: str, value: Tensor, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load(folder, **{name: value})


def test_a_missing_map_is_told(folder: Path) -> None:
    weights = checkpoint(folder)
    del weights["d2t"]
    model = build(1, 0, read_config(str(folder), trust_remote_code=False))
    with pytest.raises(ValueError, match=r"missing \['own_head.d2t'\], unknown nothing"):
        model.load_weights(weights.items())


def test_copies_of_the_targets_weights_are_left_out(tmp_path: Path) -> None:
    """Some releases of the library write them."""
    model = load(make_speculators_drafter(tmp_path / "whole"))
    assert model.own_head is None
    assert not any(weight.isnan().any() for weight in model.parameters())


def test_this_format_does_not_scale_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Any) -> Tensor:
            return super().forward(ids) * 7

    ids, plain = torch.tensor([1, 3]), Scaled(8, 4)
    assert torch.equal(unscaled(plain)(ids), plain.weight[ids])

    class ScaledParallel(compat.VocabParallelEmbedding):
        def forward(self, ids: Any) -> Tensor:
            return super().forward(ids) * 7

    # SGLang's own needs a group of ranks
    look_up = lambda self, ids: nn.functional.embedding(ids, self.weight)  # noqa: E731
    monkeypatch.setattr(compat.VocabParallelEmbedding, "forward", look_up)
    with as_rank(0, 1):
        parallel = ScaledParallel(64, 4, params_dtype=torch.float32)
    parallel.weight.data.normal_()
    assert torch.equal(unscaled(parallel)(ids), parallel.weight[ids])
