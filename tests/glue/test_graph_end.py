"""Choices, drafts and draft KV are the same whether the end of a graph has made them or not.

Every weight here requires gradients, and no test turns them off where SGLang would not: it calls
the ends of graphs outside of any `no_grad`, and Gemma's tied embedding requires gradients there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.buffers import StepRandomness
from sglang_dflash.glue.cpu import products
from sglang_dflash.glue.models.heads import DraftHead, VerifyHead
from sglang_dflash.glue.step.batch_host import Engine
from sglang_dflash.kernels import TORCH

LAYERS, HIDDEN, KV_HEADS, DIM, SLOTS, VOCAB = 3, 24, 2, 8, 20, 50


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape))


@pytest.fixture
def engine() -> Engine:
    torch.manual_seed(0)
    # all layers of a drafter turn alike
    rotary = SimpleNamespace(cos_sin_cache=torch.randn(50, DIM))

    def layer(index: int) -> Any:
        attention = SimpleNamespace(
            attn=SimpleNamespace(layer_id=index),
            kv_weight=weight(2 * KV_HEADS * DIM, HIDDEN),
            k_norm=SimpleNamespace(weight=weight(DIM)),
            rotary_emb=rotary,
        )
        return SimpleNamespace(self_attn=attention)

    found = Engine.__new__(Engine)
    found.ops = TORCH
    found.config = SimpleNamespace(block_size=4)
    found.graph_projected = None
    found.verify_head = VerifyHead(torch.nn.Identity(), TORCH, device_type="cpu")
    found.target_runner = SimpleNamespace(capture_tail_hooks=[])
    model = SimpleNamespace(
        fc=torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        hidden_norm=SimpleNamespace(weight=weight(HIDDEN)),
        layers=[layer(i) for i in range(LAYERS)],
        config=SimpleNamespace(rms_norm_eps=1e-6),
    )
    found.draft_runner = SimpleNamespace(model=model, device="cpu", capture_tail_hooks=[])
    # four rows that no token uses
    lm_head = SimpleNamespace(weight=weight(VOCAB + 4, HIDDEN))
    found.head = DraftHead(SimpleNamespace(lm_head=lm_head), VOCAB, TORCH)
    found.graph_logits = None
    found.randomness = StepRandomness(2, 4, "cpu")
    return found


@torch.no_grad()
def written(engine: Engine, features: torch.Tensor, *, in_graph: bool) -> torch.Tensor:
    keys, values = torch.zeros(2, LAYERS, SLOTS, KV_HEADS, DIM)
    engine.draft_runner.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=keys.__getitem__, get_value_buffer=values.__getitem__
    )
    positions, slots = torch.tensor([7, 8, 9, 10]), torch.tensor([3, 0, 12, 19])
    engine.write_draft_kv(features, positions, slots, in_graph=in_graph)
    return torch.stack([keys, values])


def test_the_end_of_a_graph_chooses_and_projects(engine: Engine) -> None:
    features, logits = torch.randn(8, 2 * HIDDEN), torch.randn(8, 30)
    assert torch.is_grad_enabled()
    expected = written(engine, features[:4], in_graph=False)
    assert expected[:, :, [3, 12, 19]].abs().min() > 0
    engine.finish_in_graph()
    [hook] = engine.target_runner.capture_tail_hooks
    # two graphs, the larger captured first; the batch of one request is padded to two
    for num_tokens in (8, 4, 8):
        output = SimpleNamespace(
            hidden_states=features[:num_tokens], next_token_logits=logits[:num_tokens]
        )
        hook(SimpleNamespace(capture_bs=[1, 2]), output, None, num_tokens)
    unused = torch.full_like(features[:4], float("nan"))
    torch.testing.assert_close(written(engine, unused, in_graph=True), expected)
    assert engine.graph_choices.tolist() == logits.argmax(-1).tolist()


def test_without_graphs_features_are_projected_when_they_are_written(engine: Engine) -> None:
    engine.finish_in_graph()
    features = torch.randn(4, 2 * HIDDEN)
    found = written(engine, features, in_graph=True)
    torch.testing.assert_close(found, written(engine, features, in_graph=False))


def test_the_end_of_a_draft_graph_leaves_the_drafts_and_what_they_were_chosen_from(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the products of a CPU's server
    monkeypatch.setattr(products, "multiply", lambda _x, _weight: None)
    hidden = torch.randn(8, HIDDEN)
    noise = engine.randomness.for_batch(2)
    noise.keys.random_()
    noise.scales.fill_(0.9)
    engine.draft_head_in_graph(2)
    [hook] = engine.draft_runner.capture_tail_hooks
    for num_tokens in (8, 4):
        output = SimpleNamespace(hidden_states=hidden[:num_tokens])
        hook(SimpleNamespace(capture_bs=[1, 2]), output, None, num_tokens)
        size = num_tokens // 4
        drafts, logits = engine.drafts_of_graph(size)
        with torch.inference_mode():  # as in a step
            noise = engine.randomness.for_batch(size)
            expected, from_logits = engine.draft_head(hidden[:num_tokens], noise)
        assert logits is not None and logits.shape == (size, 3, VOCAB)
        torch.testing.assert_close(logits, from_logits)
        assert torch.equal(drafts, expected) and not torch.equal(drafts[0], drafts[1])
        assert torch.equal(drafts[0], logits.argmax(-1))
