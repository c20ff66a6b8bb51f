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
from sglang_dflash.glue.step.graph_outputs import (
    HEAD_IN_GRAPH,
    DraftGraphs,
    VerifyGraphs,
    requests_with_head,
)
from sglang_dflash.kernels import TORCH
from sglang_dflash.types import DraftBlock, DraftContext, Randomness

LAYERS, HIDDEN, KV_HEADS, DIM, SLOTS, VOCAB = 3, 24, 2, 8, 20, 50


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape))


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def draft_runner(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    # all layers of a drafter share one RoPE
    rotary = SimpleNamespace(cos_sin_cache=torch.randn(50, DIM))

    # not random: the tests' weights are the same with and without it
    bias = torch.nn.Parameter(torch.linspace(-1, 1, 2 * KV_HEADS * DIM))

    def layer(index: int) -> Any:
        attention = SimpleNamespace(
            attn=SimpleNamespace(layer_id=index),
            kv_weight=weight(2 * KV_HEADS * DIM, HIDDEN),
            kv_bias=bias if request.param else None,
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
    # of newer releases: slots have the numbers that the scheduler gave them
    plan = SimpleNamespace(bind=lambda _batch, _reader: None)
    translator = SimpleNamespace(own_plan=lambda _batch: plan)
    return SimpleNamespace(
        model=model, device="cpu", capture_tail_hooks=[], kv_index_translator=translator
    )


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
    """Return a step's host after verify ran inside or outside a graph, with a sampling plan: a
    block of four rows, in a graph of eight."""
    rows = 8 if in_graph else 4
    output = SimpleNamespace(
        hidden_states=torch.zeros(rows, 2 * HIDDEN), next_token_logits=torch.zeros(rows, VOCAB)
    )
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
    # early, while the drafter ran
    host._is_planned = True
    host.verify_batches.append(None)
    unread: Any = None
    plan: Any = "a plan: the choices are made in stage 3"
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    block = DraftBlock(zeros, zeros, zeros)
    target = host.verify_block(unread, block, plan)
    # without the rows that pad a graph, and without features that nobody reads any more
    assert target.features.shape == (4, 2 * HIDDEN)
    assert output.next_token_logits.shape == (4, VOCAB) and output.hidden_states is None
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


@pytest.fixture
def without_packed_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the packed GEMMs of a CPU server."""
    monkeypatch.setattr(products, "multiply", lambda _x, _weight: None)


def noise_source(requests: int) -> StepRandomness:
    randomness = StepRandomness(requests, 4, "cpu")
    noise = randomness.for_batch(requests)
    noise.keys.random_()
    noise.scales.fill_(0.9)
    return randomness


def captured(
    draft_runner: Any,
    head: BlockHead,
    hidden: Tensor,
    randomness: StepRandomness,
    *sizes: int,
    input_ids: Tensor | None = None,
) -> DraftGraphs:
    """Return draft graphs of these sizes, captured in this order from the same hidden states."""
    graphs = DraftGraphs(head)
    requests = hidden.shape[0] // 4
    graphs.install(
        draft_runner,
        max_requests=requests,
        max_with_head=HEAD_IN_GRAPH,
        with_confidence=True,
        randomness=randomness,
    )
    hook = draft_runner.capture_tail_hooks.pop()
    for size in sizes:
        output = SimpleNamespace(hidden_states=hidden[: 4 * size])
        batch = SimpleNamespace(input_ids=input_ids)
        hook(SimpleNamespace(capture_bs=sorted(sizes)), output, batch, 4 * size)
    return graphs


@pytest.mark.usefixtures("without_packed_products")
@pytest.mark.parametrize("sizes", [(2,), (2, 1)], ids=str)
def test_the_end_of_a_draft_graph_leaves_the_drafts_and_what_they_were_chosen_from(
    draft_runner: Any, block_head: BlockHead, sizes: tuple[int, ...]
) -> None:
    hidden, randomness = torch.randn(8, HIDDEN), noise_source(2)
    assert torch.is_grad_enabled()
    graphs = captured(draft_runner, block_head, hidden, randomness, *sizes)
    # the graph that ran last
    size = sizes[-1]
    noise = randomness.for_batch(size)
    found = graphs.drafts_of(SimpleNamespace(can_run_graph=True), size, noise)
    assert found is not None
    drafts, logits, confidence = found
    with torch.inference_mode():  # as in a step
        rows = block_head.masked_rows(hidden[: 4 * size], 3)
        expected, from_logits, _ = block_head.draft(rows, noise, wanted=3)
    assert logits is not None and logits.shape == (size, 3, VOCAB)
    torch.testing.assert_close(logits, from_logits)
    assert torch.equal(drafts, expected) and not torch.equal(drafts[0], drafts[1])
    assert torch.equal(drafts[0], logits.argmax(-1))
    torch.testing.assert_close(confidence, logits.softmax(-1).amax(-1))
    assert graphs.drafts_of(SimpleNamespace(can_run_graph=False), 1, noise) is None


@pytest.mark.usefixtures("without_packed_products")
def test_large_draft_graphs_end_without_a_head(draft_runner: Any, block_head: BlockHead) -> None:
    """The head of a full block costs more than the drafter, and few of its drafts are verified."""
    hidden = torch.randn(4 * 24, HIDDEN)
    sizes = (24, HEAD_IN_GRAPH + 1, HEAD_IN_GRAPH, 4)
    graphs = captured(draft_runner, block_head, hidden, noise_source(24), *sizes)
    in_graph = SimpleNamespace(can_run_graph=True)
    assert graphs.drafts_of(in_graph, HEAD_IN_GRAPH + 1, None) is None
    assert graphs.drafts_of(in_graph, 24, None) is None
    found = graphs.drafts_of(in_graph, HEAD_IN_GRAPH, None)
    assert found is not None
    drafts, logits, _ = found
    assert logits is not None and logits.shape == (HEAD_IN_GRAPH, 3, VOCAB)
    # nothing was written for the requests of a large graph
    assert torch.equal(drafts[0], logits.argmax(-1))


def test_a_small_head_is_in_every_graph_and_a_large_one_in_small_graphs() -> None:
    smollm2, gemma4 = (49_152, 576), (262_144, 5_376)
    assert requests_with_head(*smollm2, block_size=16) >= 128
    assert requests_with_head(*gemma4, block_size=16) == HEAD_IN_GRAPH


@pytest.mark.usefixtures("without_packed_products")
def test_a_batch_larger_than_the_largest_draft_graph_takes_turns(
    draft_runner: Any, block_head: BlockHead
) -> None:
    graphs = DraftGraphs(block_head)
    assert graphs.turns(50) == [slice(0, 50)]
    graphs = captured(
        draft_runner, block_head, torch.randn(96, HIDDEN), noise_source(24), 24, 16, 4
    )
    assert graphs.turns(1) == [slice(0, 1)]
    assert graphs.turns(24) == [slice(0, 24)]
    assert graphs.turns(50) == [slice(0, 17), slice(17, 34), slice(34, 50)]


@pytest.mark.usefixtures("without_packed_products")
@pytest.mark.parametrize("wanted", [1, 2, 3])
@pytest.mark.parametrize("requests", [2, 20, 30])
def test_drafts_are_the_same_in_a_graph_outside_and_in_turns(
    draft_runner: Any, block_head: BlockHead, requests: int, wanted: int
) -> None:
    """2 requests: in a graph with the head; 20: in one without; 30: in two passes, the second of
    which overwrites the output of the first."""
    hidden, randomness = torch.randn(4 * 30, HIDDEN), noise_source(30)
    graphs = captured(draft_runner, block_head, hidden, randomness, 24, 16, 2)
    output = torch.zeros(4 * 24, HIDDEN)

    def forward(batch: Any) -> Any:
        first, rows = int(batch.req_pool_indices[0]), 4 * batch.batch_size
        assert batch.input_ids.tolist() == list(range(4 * first, 4 * first + rows))
        assert batch.seq_lens_sum == int(batch.seq_lens_cpu.sum())
        output[:rows] = hidden[4 * first : 4 * first + rows]
        result = SimpleNamespace(hidden_states=output[:rows])
        return SimpleNamespace(logits_output=result, can_run_graph=True)

    runtime: Any = SimpleNamespace(
        config=SimpleNamespace(block_size=4),
        draft_graphs=graphs,
        block_head=block_head,
        draft_runner=SimpleNamespace(
            forward=forward, kv_index_translator=draft_runner.kv_index_translator
        ),
        block_input=None,
    )
    lens = torch.arange(requests) + 7
    context = DraftContext(anchors=lens, lens=lens, request_rows=torch.arange(requests))
    rows = torch.arange(4 * requests).view(requests, 4)
    host = BatchHost(runtime, SimpleNamespace(seq_lens_cpu=lens))
    noise = randomness.for_batch(requests)
    drawn = Randomness(*noise, uniforms=torch.zeros(requests, 3))
    with torch.inference_mode():
        block = DraftBlock(rows, rows, rows)
        found = host.draft_tokens(context, block, drawn, wanted=wanted, with_confidence=True)
        found = found.first(wanted)
        masked = block_head.masked_rows(hidden[: 4 * requests], 3)
        whole, logits, _ = block_head.draft(masked, noise, wanted=3)
    assert logits is not None and found.logits is not None
    torch.testing.assert_close(found.logits, logits[:, :wanted])
    assert torch.equal(found.argmax_drafts, whole[0, :, :wanted])
    torch.testing.assert_close(found.confidence, logits.softmax(-1).amax(-1)[:, :wanted])
    # a row's noise depends on its key alone, which is that of its position in the block
    assert torch.equal(found.sampled_drafts, whole[1, :, :wanted])


@pytest.mark.usefixtures("without_packed_products")
@pytest.mark.parametrize("wanted", [1, 2, 3])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_of_whole_blocks_are_those_of_their_masked_rows(
    block_head: BlockHead, wanted: int, sampled: bool
) -> None:
    """A CPU multiplies whole blocks, since its weights are packed for these: the anchor's row must
    shift neither the drafts nor their noise."""
    hidden = torch.randn(8, HIDDEN)
    noise = noise_source(2).for_batch(2) if sampled else None
    with torch.inference_mode():
        rows = block_head.masked_rows(hidden, wanted)
        expected, from_logits, sure = block_head.draft(
            rows, noise, wanted=wanted, with_confidence=True
        )
        drafts, logits, confidence = block_head.draft_blocks(
            hidden, noise, wanted=wanted, with_confidence=True
        )
    assert torch.equal(drafts, expected)
    torch.testing.assert_close(confidence, sure)
    assert logits is not None and from_logits is not None
    torch.testing.assert_close(logits, from_logits)
