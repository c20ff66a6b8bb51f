"""The oracle's DFlash2 parts against their formulas, term by term, and the whole in decoding."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.reference.config import DrafterConfig
from sglang_dflash.reference.dflash2 import BlockConvolution, CandidateSelector
from sglang_dflash.reference.generate import draft_block, generate, generate_plain, prefill
from sglang_dflash.reference.model import SLIDING, Drafter
from sglang_dflash.reference.rejection import BlockRule
from sglang_dflash.train.drafter_setup import read_drafter_config
from tests.oracle_drafter import CONFIG
from tests.oracle_drafter import make_drafter as make_plain
from tests.tiny_configs import hf_config
from tests.unit.test_reference import make_target

SETTINGS = DFlash2(conv_taps=3, conv_group_size=4, selector_rank=6, selector_top_k=5)
PROMPT = [5, 9, 33, 12, 50, 7, 7, 21]


def make_drafter(**changes: Any) -> Drafter:
    """Return a random drafter whose convolutions and selector matter."""
    drafter = make_plain(**{"dflash2": SETTINGS, **changes})
    for name, parameter in drafter.named_parameters():
        if "conv" in name or "selector" in name:
            parameter.normal_(std=0.5)
    return drafter


@torch.no_grad()
def test_a_convolution_is_the_sum_of_its_taps_within_the_block() -> None:
    torch.manual_seed(0)
    conv = BlockConvolution(SETTINGS, 8)
    conv.base_kernel.normal_()
    x = torch.randn(2, 3 * 5, 8)
    sublayer = torch.nn.Linear(8, 8)
    found = conv.around(sublayer, x, block_size=5)
    weight = conv.kernel_projection.weight.view(2, 3, 2, 8)  # side, tap, group, input

    def convolved(rows: torch.Tensor, side: int, at: int, channel: int) -> float:
        total = 0.0
        for tap in range(3):
            if at % 5 >= tap:
                dynamic = sum(
                    float(weight[side, tap, channel // 4, i] * x[1, at, i]) for i in range(8)
                )
                base = float(conv.base_kernel[side, tap, channel])
                total += (base + dynamic) * float(rows[at - tap, channel])
        return total

    def all_rows(rows: torch.Tensor, side: int) -> torch.Tensor:
        return torch.tensor(
            [[convolved(rows, side, at, channel) for channel in range(8)] for at in range(15)]
        )

    expected = all_rows(sublayer(all_rows(x[1], 0)), 1)
    torch.testing.assert_close(found[1], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_convolution_starts_as_the_identity() -> None:
    """As in training, and so that a test can tell it from another."""
    conv = BlockConvolution(SETTINGS, 8)
    conv.kernel_projection.weight.zero_()
    x = torch.randn(1, 10, 8)
    assert torch.equal(conv.around(torch.nn.Identity(), x, block_size=5), x)


@pytest.mark.parametrize("transforms", [{}, {"output_multiplier": 0.2, "logit_cap": 3.0}])
@torch.no_grad()
def test_a_selector_scores_the_likeliest_tokens_by_the_one_before(
    transforms: dict[str, float],
) -> None:
    torch.manual_seed(0)
    settings = replace(SETTINGS, **transforms)
    selector = CandidateSelector(settings, hidden_size=8, vocab_size=20)
    for parameter in selector.parameters():
        parameter.normal_()
    logits, hidden = torch.randn(20) * 30, torch.randn(8)
    found = selector.after(7, logits, hidden)
    best = sorted(range(20), key=lambda token: -float(logits[token]))[:5]
    for token in range(20):
        if token not in best:
            assert found[token] == float("-inf")
            continue
        score = float(logits[token]) * settings.output_multiplier
        if settings.logit_cap:
            score = settings.logit_cap * math.tanh(score / settings.logit_cap)
        for r in range(6):
            projected = sum(
                float(selector.hidden_projection.weight[r, i] * hidden[i]) for i in range(8)
            )
            score += (
                float(selector.predecessor_codebook[7, r])
                * projected
                * float(selector.successor_codebook[token, r])
            )
        assert float(found[token]) == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize(("causal", "reached"), [(True, [False] * 5 + [True]), (False, [True] * 6)])
def test_what_a_row_reaches_depends_on_the_attention_not_on_the_taps(
    causal: bool, reached: list[bool]
) -> None:
    """Convolutions look back only: with causal windows a row still sees nothing to its right."""
    drafter = make_drafter(layer_types=(SLIDING, SLIDING), sliding_window=8, causal_windows=causal)
    context = drafter.context_kv(torch.randn(1, 4, 32), torch.arange(4)[None])
    x, positions = torch.randn(1, 6, 32), 4 + torch.arange(6)[None]
    changed = x.clone()
    changed[:, -1] += 1
    one, two = (drafter(each, positions, context=context) for each in (x, changed))
    assert (one != two).any(-1)[0].tolist() == reached


def test_blocks_of_one_sequence_are_convolved_apart() -> None:
    """All blocks of a sequence run in one pass; each must be as it is alone."""
    drafter = make_drafter()
    rows = drafter.context_kv(torch.randn(1, 9, 32), torch.arange(9)[None])
    x, anchors = torch.randn(1, 2, 5, 32), torch.tensor([[3, 7]])
    both = drafter.forward_anchors(x, anchors, context=rows, context_lens=torch.tensor([9]))
    for i, start in enumerate((3, 7)):
        lens = torch.tensor([start])
        positions = start + torch.arange(5)[None]
        alone = drafter(x[:, i], positions, context=rows, context_lens=lens)
        torch.testing.assert_close(both[:, i], alone)


def test_each_draft_follows_the_one_before_it() -> None:
    target, drafter = make_target("llama"), make_drafter()
    state = prefill(target, drafter, PROMPT)
    block = draft_block(target, drafter, state, block_size=8)
    ids = torch.tensor([[block.token_ids[0]] + [3] * 7])
    hidden = drafter(
        drafter.embed(target.get_input_embeddings(), ids),
        state.start + torch.arange(8)[None],
        context=state.context,
    )[0, 1:]
    logits = drafter.logits(hidden, target.get_output_embeddings())
    selector = drafter.candidate_selector
    assert selector is not None
    for previous, token, own, row in zip(
        block.token_ids, block.token_ids[1:], logits, hidden, strict=False
    ):
        assert token == int(selector.after(previous, own, row).argmax())
    # without the selector there would be other drafts
    assert list(block.token_ids[1:]) != logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_greedy_answers_equal_plain_decoding(kind: str) -> None:
    target, drafter = make_target(kind), make_drafter()
    plain = generate_plain(target, PROMPT, max_new_tokens=40)
    assert generate(target, drafter, PROMPT, max_new_tokens=40).token_ids == plain


def test_sampled_answers_are_distributed_as_plain_decodings() -> None:
    """Block verification rejects against what each draft was drawn from, given those before it."""
    target, drafter = make_target("llama"), make_drafter()
    rule, times = BlockRule(1.0, seed=0), 600
    state = prefill(target, drafter, PROMPT)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    logits = head(torch.randn(4, 32) * 0.5)
    ids = torch.tensor([[state.token_ids[-1]] + [3] * 3])
    rows = drafter(
        drafter.embed(embed, ids), state.start + torch.arange(4)[None], context=state.context
    )[0, 1:]
    own = drafter.logits(rows, head)
    counts, kept = torch.zeros(64), 0
    for _ in range(times):
        rule.start_block()
        drafts = [state.token_ids[-1]]
        for row, unary in zip(rows, own, strict=True):
            drafts.append(rule.draft_next(drafter.logits_after(drafts[-1], unary, row)))
        # the target's logits do not depend on what was drafted, so its first token does not either
        committed = rule.commit(logits, drafts[1:])
        counts[committed[0]] += 1
        kept += len(committed) - 1
    expected = logits[0].softmax(-1) * times
    # of 63 degrees of freedom; 1 in 10,000 draws exceeds 112
    assert float(((counts - expected) ** 2 / expected).sum()) < 112
    assert kept > times / 10


def test_a_drafter_survives_saving(tmp_path: Path) -> None:
    drafter = make_drafter(dflash2=replace(SETTINGS, output_multiplier=0.5, logit_cap=20.0))
    drafter.to(torch.bfloat16).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"]
    again = Drafter.from_pretrained(tmp_path)
    assert again.config.dflash2 == drafter.config.dflash2
    assert DrafterConfig.from_json(raw) == replace(CONFIG, dflash2=drafter.config.dflash2)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.float()), name


def test_the_trainer_refuses_what_it_cannot_train(tmp_path: Path) -> None:
    make_drafter().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a DFlash2 drafter, whose convolutions and selector"):
        read_drafter_config(tmp_path, hf_config("llama"))
