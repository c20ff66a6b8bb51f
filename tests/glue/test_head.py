"""Which LM heads of a target a drafter can use, and which part of the vocabulary they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from sglang_dflash.buffers import StepRandomness
from sglang_dflash.glue import compat
from sglang_dflash.glue.cpu import products
from sglang_dflash.glue.models import heads
from sglang_dflash.glue.step.graph_outputs import DraftGraphs
from sglang_dflash.kernels import TORCH
from tests.glue.test_draft_model import as_rank

VOCAB, HIDDEN = 100, 16

T = TypeVar("T")


def draft_head(lm_head: Any) -> heads.DraftHead:
    return heads.DraftHead(SimpleNamespace(lm_head=lm_head), VOCAB, TORCH)


def parallel_head(monkeypatch: pytest.MonkeyPatch, *, rank: int, size: int) -> Any:
    """Return SGLang's head as rank `rank` of `size` has it."""
    group = SimpleNamespace(world_size=size)
    monkeypatch.setitem(vars(compat), "get_tp_group", lambda: group)
    with as_rank(rank, size):
        return compat.VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=torch.float32)


class Meeting:
    """The group of ranks that run in threads of one process: each gets the parts of all."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self._barrier = threading.Barrier(size, timeout=30)
        self._parts: dict[int, torch.Tensor] = {}

    def all_gather(self, rank: int, part: torch.Tensor, dim: int) -> torch.Tensor:
        self._parts[rank] = part
        self._barrier.wait()
        found = torch.cat([self._parts[i] for i in range(self.world_size)], dim)
        self._barrier.wait()
        return found


def on_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
    weight: torch.Tensor,  # [V, H], of the whole head
    ask: Callable[[heads.DraftHead], T],
) -> list[T]:
    """Return what each of two ranks answers, with its shard of the head."""
    monkeypatch.setattr(products, "multiply", lambda _x, _weight: None)
    meeting = Meeting(2)

    def shard_of(rank: int) -> heads.DraftHead:
        lm_head = parallel_head(monkeypatch, rank=rank, size=2)
        head = draft_head(lm_head)
        lm_head.weight.data[: head._size] = weight[head._start : head._start + head._size]
        gather = partial(meeting.all_gather, rank)
        head._group = SimpleNamespace(world_size=2, all_gather=gather)
        return head

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(ask, [shard_of(rank) for rank in (0, 1)]))


def test_a_tied_embedding_is_whole_on_every_rank() -> None:
    """Gemma 4's head is a plain torch embedding."""
    found = draft_head(nn.Embedding(VOCAB + 4, HIDDEN))
    assert found.sees_all
    assert found.without_vocab_padding(found.allocate_logits(3)).shape == (3, VOCAB)


def test_a_parallel_head_says_which_tokens_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    lm_head = parallel_head(monkeypatch, rank=1, size=2)
    found = draft_head(lm_head)
    assert not found.sees_all
    # 100 tokens are padded to 128; the second rank holds the last 36
    assert (found._start, found._size) == (64, 36)


def test_drafting_takes_the_head_without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper for LoRA does not say which tokens a rank holds, and adapts the target's rows."""
    head = parallel_head(monkeypatch, rank=1, size=2)
    found = draft_head(compat.BaseLayerWithLoRA(head, lora_backend=None))
    assert found._head is head
    assert (found._start, found._size) == (64, 36)


def test_a_parallel_head_without_its_indices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank's shard were taken for the whole vocabulary, it would give wrong token ids."""
    lm_head = parallel_head(monkeypatch, rank=1, size=2)
    del lm_head.shard_indices
    with pytest.raises(AttributeError, match="shard_indices"):
        draft_head(lm_head)


@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_ranks_are_as_confident_as_one_with_the_whole_vocabulary(
    monkeypatch: pytest.MonkeyPatch, logit_cap: float
) -> None:
    """Each sees a part: the others may have a higher logit, and add to the sum."""
    weight = torch.randn(VOCAB, HIDDEN)
    hidden = torch.randn(5, HIDDEN)
    whole = nn.Embedding(VOCAB, HIDDEN, _weight=weight)
    expected = TORCH.peak_probabilities(hidden @ weight.T, logit_cap)
    assert torch.equal(draft_head(whole).confidence(hidden @ weight.T, logit_cap), expected)

    def ask(head: heads.DraftHead) -> torch.Tensor:
        return head.confidence(head.multiply(hidden), logit_cap)

    for found in on_two_ranks(monkeypatch, weight, ask):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_graph", [False, True], ids=["outside a graph", "in a graph"])
def test_ranks_draft_as_one_with_the_whole_vocabulary(
    monkeypatch: pytest.MonkeyPatch, in_graph: bool
) -> None:
    """Argmax drafts, sampled drafts and the logits that say whether these are kept. If sampled
    drafts fell back to argmax, fewer would be kept at temperature 1 than on one card."""
    weight, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(8, HIDDEN)
    randomness = StepRandomness(2, 4, "cpu")
    noise = randomness.for_batch(2)
    noise.keys.random_()
    noise.scales.fill_(1.0)

    def ask(head: heads.DraftHead) -> list[heads.Drafted]:
        blocks = heads.BlockHead(head, block_size=4, logit_cap=5.0)
        if not in_graph:
            rows = blocks.masked_rows(hidden, 3)
            return [blocks.draft(rows, each, wanted=3) for each in (None, noise)]
        graphs, runner = DraftGraphs(blocks), SimpleNamespace(device="cpu", capture_tail_hooks=[])
        sizes = {"max_requests": 2, "max_with_head": 2}
        graphs.install(runner, **sizes, with_confidence=False, randomness=randomness)
        output = SimpleNamespace(hidden_states=hidden)
        runner.capture_tail_hooks[0](SimpleNamespace(capture_bs=[2]), output, None, 8)
        replayed = SimpleNamespace(can_run_graph=True)
        found = [graphs.drafts_of(replayed, 2, each) for each in (None, noise)]
        return [each for each in found if each is not None]

    on_ranks = on_two_ranks(monkeypatch, weight, ask)
    _, whole = ask(draft_head(nn.Embedding(VOCAB, HIDDEN, _weight=weight)))
    assert not torch.equal(whole.drafts[0], whole.drafts[1])
    for greedy, sampled in on_ranks:
        assert torch.equal(greedy.drafts[0], whole.drafts[0])
        assert greedy.logits is None, "greedy steps gather no logits"
        assert torch.equal(sampled.drafts, whole.drafts)
        torch.testing.assert_close(sampled.logits, whole.logits)


def test_a_part_of_a_vocabulary_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(Linear\) has 50 rows for a vocabulary of 100"):
        draft_head(nn.Linear(HIDDEN, VOCAB // 2, bias=False))


def processor_with(**changed: Any) -> Any:
    """Return SGLang's logits processor of a model with a softcap."""
    processor = object.__new__(compat.LogitsProcessor)
    nn.Module.__init__(processor)
    settings: dict[str, Any] = {
        "logit_scale": None,
        "do_tensor_parallel_all_gather": False,
        "do_tensor_parallel_all_gather_dp_attn": False,
        "use_fp32_lm_head": False,
        "rl_on_policy_target": None,
        "final_logit_softcapping": 30.0,
        "vocab_size": VOCAB,
    }
    for name, value in {**settings, **changed}.items():
        setattr(processor, name, value)
    return processor


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        ("cuda", [{}], None),
        ("cpu", [{}], "no gain on a CPU"),
        ("cuda", [], "the model has 0 logits processors, but ours replaces exactly one"),
        ("cuda", [{}, {}], "the model has 2 logits processors, but ours replaces exactly one"),
        ("cuda", [{"logit_scale": 0.5}], "the model scales its logits"),
        (
            "cuda",
            [{"do_tensor_parallel_all_gather_dp_attn": True}],
            "data-parallel attention gathers them",
        ),
    ],
    ids=["ours", "CPU", "no processor", "two processors", "scaled", "gathered"],
)
def test_sglangs_logits_are_kept_with_a_reason(
    device: str, settings: list[dict[str, Any]], reason: str | None
) -> None:
    """Otherwise half a gigabyte of fp32 per step would go unexplained."""
    processors = []
    for changed in settings:
        processors.append(processor_with(**changed))
    found = heads.VerifyHead(nn.ModuleList(processors), TORCH, device_type=device)
    if reason is None:
        assert (
            found.serves == "sglang_dflash (logits in the head's dtype, softcap applied on the fly)"
        )
        assert found.cap == 30.0
    else:
        assert (found.serves, found.cap) == (f"sglang (fp32 logits: {reason})", 0.0)
    assert all(("_get_logits" in vars(each)) == (reason is None) for each in processors)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"weight": torch.zeros(VOCAB, HIDDEN).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"weight": torch.zeros(VOCAB, HIDDEN // 8, dtype=torch.int32)}, "int32"),
        ({"qweight": torch.zeros(VOCAB, HIDDEN // 8, dtype=torch.int32)}, "no weight"),
    ],
    ids=["fp8", "packed", "no weight"],
)
def test_a_quantised_head_is_refused_with_what_it_is(
    tensors: dict[str, torch.Tensor], found: str
) -> None:
    """Otherwise torch would raise during graph capture or in the first step."""

    class Fp8LinearMethod:
        pass

    lm_head = SimpleNamespace(**tensors, quant_method=Fp8LinearMethod())
    with pytest.raises(ValueError, match=f"lm_head is quantised .*{found}.* by Fp8LinearMethod"):
        draft_head(lm_head)


def verify_logits(
    processor: Any, lm_head: nn.Module, hidden: torch.Tensor, buffer: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits of a verify pass, with SGLang's buffer if it is captured in a graph."""
    metadata = SimpleNamespace(
        forward_mode=compat.ForwardMode.TARGET_VERIFY, next_token_logits_buffer=buffer
    )
    return processor._get_logits(hidden, lm_head, metadata)


def product(hidden: torch.Tensor, lm_head: Any, _bias: None) -> torch.Tensor:
    return hidden @ lm_head.weight.detach().T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padding", [0, 28])
def test_all_graphs_write_their_logits_to_the_same_memory(dtype: torch.dtype, padding: int) -> None:
    """Each graph keeps what it allocates, and there are dozens of them."""
    processor = processor_with(_compute_lm_head=product)
    heads.VerifyHead(nn.ModuleList([processor]), TORCH, device_type="cuda")
    lm_head = nn.Linear(HIDDEN, VOCAB + padding, bias=False, dtype=dtype)
    assert lm_head.weight.requires_grad, "as some targets' heads do"
    buffer = torch.zeros(12, VOCAB)
    for rows in (12, 4):
        hidden = torch.randn(rows, HIDDEN, dtype=dtype)
        found = verify_logits(processor, lm_head, hidden, buffer[:rows])
        expected = verify_logits(processor, lm_head, hidden, None)
        assert found.shape == expected.shape == (rows, VOCAB) and found.dtype == dtype
        assert (found == expected).all()
        # fp32 logits fit only without padding
        is_shared = dtype != torch.float32 or not padding
        assert (found.data_ptr() == buffer.data_ptr()) == is_shared


@pytest.mark.parametrize(
    "changed", [{"use_fp32_lm_head": True}, {"rl_on_policy_target": "fsdp"}], ids=str
)
def test_logits_that_are_more_than_a_product_stay_sglangs(changed: dict[str, Any]) -> None:
    processor = processor_with(_compute_lm_head=product, **changed)
    heads.VerifyHead(nn.ModuleList([processor]), TORCH, device_type="cuda")
    buffer = torch.zeros(3, VOCAB)
    lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
    assert verify_logits(processor, lm_head, torch.randn(3, HIDDEN), buffer).any()
    assert not buffer.any()
