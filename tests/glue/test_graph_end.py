"""Choices, drafts and draft KV are the same whether the tail of a CUDA graph made them or not.

Every weight here requires gradients, and no test disables them where SGLang would not: it calls
graph tails outside of any `no_grad`, and Gemma's tied embedding requires gradients there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.buffers import StepRandomness
from sglang_dflash.glue.cpu import products
from sglang_dflash.glue.models.heads import BlockHead, DraftHead, VerifyHead
from sglang_dflash.glue.step.batch_host import BatchHost
from sglang_dflash.glue.step.draft_cache import DraftCache
from sglang_dflash.glue.step.graph_outputs import DraftGraphs, VerifyGraphs
from sglang_dflash.kernels import TORCH

LAYERS, HIDDEN, KV_HEADS, DIM, SLOTS, VOCAB = 3, 24, 2, 8, 20, 50


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape))


@pytest.fixture
def draft_runner() -> Any:
    torch.manual_seed(0)
    # all layers of a drafter share one RoPE
    rotary = SimpleNamespace(cos_sin_cache=torch.randn(50, DIM))

    def layer(index: int) -> Any:
        attention = SimpleNamespace(
            attn=SimpleNamespace(layer_id=index),
            kv_weight=weight(2 * KV_HEADS * DIM, HIDDEN),
            k_norm=SimpleNamespace(weight=weight(DIM)),
            rotary_emb=rotary,
        )
        return SimpleNamespace(self_attn=attention)

    model = SimpleNamespace(
        fc=torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        hidden_norm=SimpleNamespace(weight=weight(HIDDEN)),
        layers=[layer(i) for i in range(LAYERS)],
        config=SimpleNamespace(rms_norm_eps=1e-6),
    )
    return SimpleNamespace(model=model, device="cpu", capture_tail_hooks=[])


@pytest.fixture
def cache(draft_runner: Any) -> DraftCache:
    return DraftCache(draft_runner, TORCH)


@pytest.fixture
def verify_graphs(cache: DraftCache) -> VerifyGraphs:
    head = VerifyHead(torch.nn.Identity(), TORCH, device_type="cpu")
    return VerifyGraphs(head, cache, block_size=4)


@pytest.fixture
def block_head(draft_runner: Any) -> BlockHead:
    # four rows of vocabulary padding
    lm_head = SimpleNamespace(weight=weight(VOCAB + 4, HIDDEN))
    head = DraftHead(SimpleNamespace(lm_head=lm_head), VOCAB, TORCH)
    return BlockHead(head, block_size=4, logit_cap=0.0)


@torch.no_grad()
def written(draft_runner: Any, writer: DraftCache | BatchHost, features: Tensor) -> Tensor:
    keys, values = torch.zeros(2, LAYERS, SLOTS, KV_HEADS, DIM)
    draft_runner.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=keys.__getitem__, get_value_buffer=values.__getitem__
    )
    positions, slots = torch.tensor([7, 8, 9, 10]), torch.tensor([3, 0, 12, 19])
    write = writer.write if isinstance(writer, DraftCache) else writer.write_draft_kv
    write(features, positions, slots)
    return torch.stack([keys, values])


def host_after_verify(cache: DraftCache, graphs: VerifyGraphs, *, in_graph: bool) -> BatchHost:
    """Return a step's host after verify ran inside or outside a graph, with a sampling plan."""
    output = SimpleNamespace(hidden_states=None, next_token_logits=None)
    result = SimpleNamespace(logits_output=output, can_run_cuda_graph=in_graph)
    runtime: Any = SimpleNamespace(
        config=SimpleNamespace(block_size=4),
        device_module=torch.cpu,
        plan_stream=torch.cpu.Stream(),
        target_worker=SimpleNamespace(forward_batch_generation=lambda **_given: result),
        verify_head=SimpleNamespace(cap=0.0),
        verify_graphs=graphs,
        draft_cache=cache,
    )
    host = BatchHost(runtime, SimpleNamespace(seq_lens_cpu=torch.tensor([7])))
    unread: Any = None
    plan: Any = "a plan: the choices are made in stage 3"
    host.verify_block(unread, unread, plan)
    return host


def test_the_end_of_a_graph_chooses_and_projects(
    draft_runner: Any, cache: DraftCache, verify_graphs: VerifyGraphs
) -> None:
    features, logits = torch.randn(8, 2 * HIDDEN), torch.randn(8, 30)
    assert torch.is_grad_enabled()
    expected = written(draft_runner, cache, features[:4])
    assert expected[:, :, [3, 12, 19]].abs().min() > 0
    target_runner = SimpleNamespace(capture_tail_hooks=[])
    verify_graphs.install(target_runner)
    [hook] = target_runner.capture_tail_hooks
    # two graphs, the larger captured first; the batch of one request is padded to two
    for num_tokens in (8, 4, 8):
        output = SimpleNamespace(
            hidden_states=features[:num_tokens], next_token_logits=logits[:num_tokens]
        )
        hook(SimpleNamespace(capture_bs=[1, 2]), output, None, num_tokens)
    unused = torch.full_like(features[:4], float("nan"))
    host = host_after_verify(cache, verify_graphs, in_graph=True)
    torch.testing.assert_close(written(draft_runner, host, unused), expected)
    left = verify_graphs.outputs_of(SimpleNamespace(can_run_cuda_graph=True))
    assert left is not None
    assert left.choices.tolist() == logits.argmax(-1).tolist()
    # a batch larger than any graph: the graph outputs belong to another step
    host = host_after_verify(cache, verify_graphs, in_graph=False)
    other = torch.randn(4, 2 * HIDDEN)
    torch.testing.assert_close(
        written(draft_runner, host, other), written(draft_runner, cache, other)
    )


def test_without_graphs_features_are_projected_when_they_are_written(
    draft_runner: Any, cache: DraftCache, verify_graphs: VerifyGraphs
) -> None:
    verify_graphs.install(SimpleNamespace(capture_tail_hooks=[]))
    features = torch.randn(4, 2 * HIDDEN)
    host = host_after_verify(cache, verify_graphs, in_graph=True)
    found = written(draft_runner, host, features)
    torch.testing.assert_close(found, written(draft_runner, cache, features))


def test_the_end_of_a_draft_graph_leaves_the_drafts_and_what_they_were_chosen_from(
    draft_runner: Any, block_head: BlockHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    # disable the packed GEMMs of a CPU server
    monkeypatch.setattr(products, "multiply", lambda _x, _weight: None)
    hidden = torch.randn(8, HIDDEN)
    randomness, graphs = StepRandomness(2, 4, "cpu"), DraftGraphs(block_head)
    noise = randomness.for_batch(2)
    noise.keys.random_()
    noise.scales.fill_(0.9)
    graphs.install(draft_runner, max_requests=2, randomness=randomness)
    [hook] = draft_runner.capture_tail_hooks
    for num_tokens in (8, 4):
        output = SimpleNamespace(hidden_states=hidden[:num_tokens])
        hook(SimpleNamespace(capture_bs=[1, 2]), output, None, num_tokens)
        size = num_tokens // 4
        found = graphs.drafts_of(SimpleNamespace(can_run_graph=True), size)
        assert found is not None
        drafts, logits = found
        with torch.inference_mode():  # as in a step
            noise = randomness.for_batch(size)
            expected, from_logits = block_head.draft(hidden[:num_tokens], noise)
        assert logits is not None and logits.shape == (size, 3, VOCAB)
        torch.testing.assert_close(logits, from_logits)
        assert torch.equal(drafts, expected) and not torch.equal(drafts[0], drafts[1])
        assert torch.equal(drafts[0], logits.argmax(-1))
    assert graphs.drafts_of(SimpleNamespace(can_run_graph=False), 1) is None
