"""Which LM heads of a target a drafter can use, and which part of the vocabulary they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dflash.glue import compat
from sglang_dflash.glue.models import heads
from sglang_dflash.kernels import TORCH
from tests.glue.test_draft_model import as_rank

VOCAB, HIDDEN = 100, 16


def draft_head(lm_head: Any) -> heads.DraftHead:
    return heads.DraftHead(SimpleNamespace(lm_head=lm_head), VOCAB, TORCH)


def parallel_head(monkeypatch: pytest.MonkeyPatch, *, rank: int, size: int) -> Any:
    """Return SGLang's head as rank `rank` of `size` has it."""
    group = SimpleNamespace(world_size=size)
    monkeypatch.setitem(vars(compat), "get_tp_group", lambda: group)
    with as_rank(rank, size):
        return compat.VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=torch.float32)


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

    def ask(rank: int, gather: Any) -> torch.Tensor:
        head = draft_head(parallel_head(monkeypatch, rank=rank, size=2))
        head._group = SimpleNamespace(world_size=2, all_gather=gather)
        shard = slice(head._start, head._start + head._size)
        return head.confidence(hidden @ weight[shard].T, logit_cap)

    sent: list[torch.Tensor] = []

    def send(part: torch.Tensor, dim: int) -> torch.Tensor:
        sent.append(part)
        return torch.cat([part, part], dim)

    for rank in (0, 1):
        ask(rank, send)
    for rank in (0, 1):
        found = ask(rank, lambda _part, dim: torch.cat(sent, dim))
        torch.testing.assert_close(found, expected)


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
