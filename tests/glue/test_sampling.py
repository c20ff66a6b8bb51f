"""Logit processing of each row of a block, against SGLang one token at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.glue import release, seams
from sglang_dflash.glue.sampling.grammar_mask import mask_rows
from sglang_dflash.glue.sampling.penalties import PenaltyTable
from sglang_dflash.glue.sampling.refusals import refuse_request

VOCAB, END = 40, 7


class Req(SimpleNamespace):
    """A request, equal to itself only, as SGLang's is."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def make_req(row: int, *, prompt: int = 5, output: tuple[int, ...] = (), **params: Any) -> Any:
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
    }
    return Req(
        req_pool_idx=row,
        kv=SimpleNamespace(req_pool_idx=row),
        eos_token_ids={11},
        origin_input_ids=[1] * prompt,
        output_ids=list(output),
        sampling_params=SimpleNamespace(**defaults | params),
        tokenizer=SimpleNamespace(eos_token_id=END, additional_stop_token_ids=None),
    )


def make_reqs() -> list[Any]:
    return [
        make_req(3, frequency_penalty=0.7),
        make_req(1),
        make_req(4, presence_penalty=1.1, repetition_penalty=1.6, prompt=9),
        make_req(2, min_new_tokens=4, stop_token_ids={5}),
        make_req(6, frequency_penalty=-0.4, presence_penalty=0.5, repetition_penalty=1.2),
    ]


class Batch:
    """The part of a batch that SGLang's penalisers read; they keep a weak reference."""

    device = "cpu"

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs


def plain_logits(reqs: list[Any], history: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
    """Return the logits as SGLang's penalisers change them after each request's tokens."""
    from sglang.srt.sampling import penaltylib

    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    found = []
    for i, tokens in enumerate(history):
        alone = Batch([reqs[i]])
        orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCAB, alone, kinds)
        for token in tokens:
            orchestrator.cumulate_output_tokens(torch.tensor([token]))
        row = logits[i : i + 1].clone()
        added = torch.zeros_like(row)
        orchestrator.accumulate_additive_penalties(added)
        row.add_(added)
        scaling = orchestrator.accumulate_scaling_penalties()
        if scaling is not None:
            row = torch.where(row < 0, row * scaling, row / scaling)
        found.append(row)
    return torch.cat(found)


def test_rows_are_penalised_as_if_the_drafts_before_them_were_generated() -> None:
    """Three steps with different commits; every row of every block against SGLang's penalisers."""
    torch.manual_seed(0)
    reqs = make_reqs()
    table = PenaltyTable(VOCAB, "cpu")
    first = torch.randint(0, 10, (len(reqs),))
    table.start(reqs, first)
    history = [[int(token)] for token in first]
    width = 4
    for step in range(3):
        # few distinct values, so that tokens repeat
        drafts = torch.randint(0, 10, (len(reqs), width - 1))
        anchors = torch.tensor([tokens[-1] for tokens in history])
        block = torch.cat([anchors[:, None], drafts], dim=1)
        logits = torch.randn(len(reqs), width, VOCAB)
        lens = torch.tensor(
            [len(r.origin_input_ids) + len(h) - 1 for r, h in zip(reqs, history, strict=True)]
        )
        found = logits.clone()
        table.apply(found, reqs, block, lens)
        for row in range(width):
            seen = [h + block[i, 1 : row + 1].tolist() for i, h in enumerate(history)]
            torch.testing.assert_close(
                found[:, row], plain_logits(reqs, seen, logits[:, row]), atol=1e-6, rtol=1e-6
            )
        commit_lens = torch.tensor([1, 2, 4, 3, 2]).roll(step)
        committed = torch.randint(0, 10, (len(reqs), width))
        table.commit(reqs, committed, commit_lens)
        for i, tokens in enumerate(history):
            tokens += committed[i, : commit_lens[i]].tolist()


def test_a_retracted_request_brings_its_answer_along_and_a_new_one_starts_clean() -> None:
    params = {"frequency_penalty": 1.0}
    table = PenaltyTable(VOCAB, "cpu")
    block, lens = torch.tensor([[9, 3]]), torch.tensor([7])
    expected = {"back": [4, 4, 9], "new": [9]}
    for name, output in (("back", (4, 4)), ("new", ())):
        req = make_req(3, output=output, **params)
        table.start([req], torch.tensor([9]))
        logits = torch.zeros(1, 2, VOCAB)
        table.apply(logits, [req], block, lens)
        counts = torch.bincount(torch.tensor(expected[name]), minlength=VOCAB).float()
        torch.testing.assert_close(logits[0, 0], -counts)


def held_bytes(table: PenaltyTable) -> int:
    """Return the memory that a table's sums keep alive."""
    storages = {
        sums.untyped_storage().data_ptr(): sums.untyped_storage().nbytes()
        for part in table._sums.values()
        for sums in vars(part).values()
    }
    return sum(storages.values())


def test_ended_requests_leave_no_sums_behind() -> None:
    """Views of a step's sums once kept those of its whole batch: 14 GiB after 128 requests with
    151,936 tokens had ended one by one."""
    table = PenaltyTable(VOCAB, "cpu")
    reqs = [make_req(row, frequency_penalty=0.5) for row in range(8)]
    table.start(reqs)
    one = held_bytes(table) // len(reqs)
    while reqs:
        table.commit(reqs, torch.ones(len(reqs), 2, dtype=torch.int64), torch.ones(len(reqs)))
        assert held_bytes(table) == one * len(reqs)
        reqs.pop()
    assert held_bytes(table) == 0


class Letters:
    """A grammar over tokens 0..9 that must ascend, with SGLang's interface."""

    finished = False

    def __init__(self) -> None:
        self.taken: list[int] = []

    def is_terminated(self) -> bool:
        return bool(self.taken) and self.taken[-1] == 9

    def accept_token(self, token: int) -> None:
        if self.taken and token <= self.taken[-1]:
            raise ValueError(token)
        self.taken.append(token)

    def rollback(self, count: int) -> None:
        del self.taken[-count:]

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return torch.ones(batch_size, vocab_size, dtype=torch.bool)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = torch.arange(mask.shape[1]) > (self.taken[-1] if self.taken else -1)

    @staticmethod
    def move_vocab_mask(mask: torch.Tensor, device: Any) -> torch.Tensor:
        return mask


def test_each_row_allows_what_the_grammar_allows_after_its_drafts() -> None:
    grammars = [Letters(), None, Letters(), Letters()]
    grammars[0].taken, grammars[2].taken, grammars[3].taken = [2], [5], [1]
    reqs = [SimpleNamespace(grammar=grammar) for grammar in grammars]
    blocks = [[2, 4, 6, 5], [0, 0, 0, 0], [5, 3, 8, 9], [1, 4, 9, 9]]
    mask = mask_rows(reqs, blocks, vocab_size=10, device="cpu").vocab_mask.view(4, 4, 10)
    allowed = [[row.nonzero().flatten().tolist() for row in request] for request in mask]
    everything = list(range(10))
    assert allowed[0] == [[3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [7, 8, 9], everything]
    assert allowed[1] == [everything] * 4
    # the first draft is forbidden, so later rows are unreachable
    assert allowed[2][0] == [6, 7, 8, 9] and allowed[2][1:] == [everything] * 3
    # the second draft ends the text
    assert allowed[3] == [[2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9], everything, everything]
    # only committed tokens may advance a grammar
    assert [g.taken for g in grammars if g] == [[2], [5], [1]]


@pytest.fixture(autouse=True)
def half_precision(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target in bfloat16."""
    target = SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr(seams, "model_config", lambda _server_args: target)
    return target


def refusal(*, overlap: bool = False, server: dict[str, Any] | None = None, **asked: Any) -> Any:
    params = {
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "min_p": 0.0,
    }
    req = SimpleNamespace(
        return_hidden_states=asked.pop("return_hidden_states", False),
        return_sampling_mask=asked.pop("return_sampling_mask", False),
        custom_logit_processor=asked.pop("custom_logit_processor", None),
        input_embeds=asked.pop("input_embeds", None),
        sampling_params=SimpleNamespace(**params | asked),
    )
    settings = {
        "grammar_backend": "xgrammar",
        "enable_deterministic_inference": False,
    }
    return refuse_request(req, SimpleNamespace(**settings | (server or {})), enable_overlap=overlap)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"return_hidden_states": True},
            "return_hidden_states exactly.*Drop the parameter, or send .* without DFLASH.$",
        ),
        (
            {"custom_logit_processor": "x", "overlap": True},
            "or start the server with --disable-overlap-schedule",
        ),
        (
            {"regex": "a", "server": {"grammar_backend": "outlines"}},
            "outlines cannot roll back .*, or start .* --grammar-backend xgrammar or llguidance.$",
        ),
        (
            {"min_p": 0.1, "server": {"enable_deterministic_inference": True}},
            "min_p exactly: SGLang's seeded sampler has no min_p",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_with_a_reason(asked: dict[str, Any], message: str) -> None:
    found = refusal(**asked)
    assert found is not None and found.startswith("DFLASH cannot serve")
    assert re.search(message, found), found


def test_embeddings_need_the_dtype_that_sglang_gives_them(half_precision: Any) -> None:
    half_precision.dtype = torch.float16
    message = "a target in torch.float16 cannot use.* without DFLASH, or start the server with "
    assert re.search(message + "--dtype bfloat16", refusal(input_embeds=[[0.5]]))


def test_masks_are_refused_where_sglang_would_promise_them() -> None:
    found = refusal(return_sampling_mask=True)
    assert (found is not None) == (release.installed() != "0.5.17")
    assert found is None or "the masks of a block's rows are not kept" in found


def test_everything_else_is_served() -> None:
    assert refusal(regex="a") is None
    assert refusal(custom_logit_processor="x") is None
    assert refusal(min_p=0.1) is None
    assert refusal(input_embeds=[[0.5]]) is None


def test_seeded_noise_is_sglangs_own() -> None:
    """The CPU stand-in against SGLang's kernel in Triton's interpreter."""
    code = """
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
from sglang_dflash.glue.cpu.sampling import _murmur_hash32
seed = torch.tensor([0, 42, 2**40 + 3, 2**62 - 5], dtype=torch.uint64)
positions, columns = torch.tensor([0, 7, 100000, 31]), torch.arange(1500)
one = torch.empty(4, 1500, dtype=torch.uint32)
murmur_hash32_kernel[4, 2](seed, positions, columns, one, 4, 1500, BLOCK_SIZE=1024)
two = _murmur_hash32(None, seed, positions, columns)
assert two.dtype == torch.uint32
assert torch.equal(one.long(), two.long())
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
