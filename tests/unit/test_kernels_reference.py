"""The torch twins are the specification, so their test cases can be checked by eye."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare, kstest

from sglang_dflash.kernels import COUNT_MATCHES, TORCH, Noise, choose
from sglang_dflash.kernels.accept.reference import accept_block
from sglang_dflash.kernels.attention.reference import index_prefixes, paged_attention
from sglang_dflash.kernels.block.reference import build_block
from sglang_dflash.kernels.context.reference import context_hidden, write_context
from sglang_dflash.kernels.logits.reference import gumbel
from sglang_dflash.kernels.rows.reference import pack_rows, share_rows
from sglang_dflash.kernels.sampling.reference import (
    argmax_and_sample,
    argmax_rows,
    peak_probabilities,
    reject_by_block,
    sample_rows,
)
from sglang_dflash.reference import Drafter, DrafterConfig
from sglang_dflash.reference.rejection import BlockRule


def test_block_starts_with_the_anchor_and_masks_the_rest() -> None:
    table = torch.arange(100).view(2, 50) + 1000
    out = [torch.full((2, 4), -7) for _ in range(3)]
    build_block(
        torch.tensor([5, 6]),
        torch.tensor([10, 20]),
        torch.tensor([1, 0]),
        table,
        mask_token_id=99,
        last_position=63,
        token_ids=out[0],
        positions=out[1],
        slots=out[2],
    )
    assert out[0].tolist() == [[5, 99, 99, 99], [6, 99, 99, 99]]
    assert out[1].tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert out[2].tolist() == [[1060, 1061, 1062, 1063], [1020, 1021, 1022, 1023]]


def test_positions_stop_at_the_context_but_slots_go_on() -> None:
    """Rows past the context still need slots of their own: a shared slot would be overwritten."""
    out = [torch.zeros(1, 4, dtype=torch.int64) for _ in range(3)]
    build_block(
        torch.tensor([5]),
        torch.tensor([30]),
        torch.tensor([0]),
        torch.arange(50)[None],
        mask_token_id=9,
        last_position=31,
        token_ids=out[0],
        positions=out[1],
        slots=out[2],
    )
    assert out[1].tolist() == [[30, 31, 31, 31]]
    assert out[2].tolist() == [[30, 31, 32, 33]]


@pytest.mark.parametrize(
    ("block", "choices", "committed", "kept"),
    [
        pytest.param([7, 1, 2, 9], [1, 2, 3, 4], [1, 2, 3, 0], 3, id="third draft wrong"),
        pytest.param([7, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], 4, id="all right"),
        pytest.param([7, 5, 2, 3], [1, 2, 3, 4], [1, 0, 0, 0], 1, id="later ones do not count"),
        pytest.param([7, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], 4, id="repeats"),
    ],
)
def test_a_block_commits_the_correct_drafts_and_the_bonus(
    block: list[int], choices: list[int], committed: list[int], kept: int
) -> None:
    lens, tokens, bonus, new_lens, slots = accept_block(
        *map(torch.tensor, ([block], [choices], [100], [[11, 12, 13, 14]]))
    )
    assert lens.tolist() == [kept] and lens.dtype == torch.int32
    assert tokens.tolist() == [committed]
    assert bonus.tolist() == [choices[kept - 1]]
    assert new_lens.tolist() == [100 + kept] and new_lens.dtype == torch.int64
    # rows past the commit go to the scratch slot
    assert slots.tolist() == [[11, 12, 13, 14][:kept] + [0] * (4 - kept)]


def test_who_knows_better_says_how_many_drafts_count() -> None:
    lens, tokens, bonus, new_lens, slots = accept_block(
        *map(torch.tensor, ([[7, 1, 2, 9], [7, 1, 2, 3]], [[5, 6, 7, 8]] * 2, [100, 200])),
        torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]]),
        torch.tensor([2, 0], dtype=torch.int32),
    )
    assert lens.tolist() == [3, 1]
    assert tokens.tolist() == [[1, 2, 7, 0], [5, 0, 0, 0]]
    assert (bonus.tolist(), new_lens.tolist()) == ([7, 5], [103, 201])
    assert slots.tolist() == [[11, 12, 13, 0], [21, 0, 0, 0]]


def test_a_request_that_is_not_told_has_its_leading_matches_counted() -> None:
    """One batch mixes requests decided by block verification with others that follow choices."""
    block = torch.tensor([[7, 1, 2, 9]] * 3)
    choices = torch.tensor([[1, 2, 3, 4]] * 3)
    slots = torch.tensor([[11, 12, 13, 14]] * 3)
    told = torch.tensor([COUNT_MATCHES, 0, 3], dtype=torch.int32)
    lens, tokens, bonus, *_ = accept_block(
        block, choices, torch.tensor([100, 200, 300]), slots, told
    )
    assert lens.tolist() == [3, 1, 4] and lens.dtype == torch.int32
    assert tokens.tolist() == [[1, 2, 3, 0], [1, 0, 0, 0], [1, 2, 9, 4]]
    assert bonus.tolist() == [3, 1, 4]


def test_requests_that_share_rows_commit_from_their_own() -> None:
    """Three, one and two rows; the first row of a request must not count as a draft of another."""
    bounds, slots = torch.tensor([0, 3, 4, 6]), torch.arange(11, 17)
    told = torch.tensor([COUNT_MATCHES, 5, 0], dtype=torch.int32)
    shared = (
        *map(torch.tensor, ([7, 1, 2, 3, 7, 5], [1, 2, 3, 7, 9, 4])),
        torch.zeros(3).long(),
        slots,
    )
    lens, tokens, bonus, new_lens, kept = accept_block(*shared, told, bounds, 4)
    assert lens.tolist() == new_lens.tolist() == [3, 1, 1]
    assert tokens.tolist() == [[1, 2, 3, 0], [7, 0, 0, 0], [9, 0, 0, 0]]
    assert bonus.tolist() == [3, 7, 9]
    assert kept.tolist() == [11, 12, 13, 14, 15, 0]


def test_rows_go_to_the_drafts_likeliest_to_survive() -> None:
    """Survival 0.9, 0.81, 0.081 and 0.5, 0.45, 0.405."""
    confidence = torch.tensor([[0.9, 0.9, 0.1], [0.5, 0.9, 0.9]])
    offsets, slopes = torch.zeros(4), torch.ones(4)
    shares = [share_rows(confidence, offsets, slopes, n).tolist() for n in range(2, 9)]
    assert [bounds[1] for bounds in shares] == [1, 2, 3, 3, 3, 3, 4]
    assert [bounds[::2] for bounds in shares] == [[0, n] for n in range(2, 9)]
    # equal drafts: the lower request first, and NaN last
    same = torch.tensor([[math.nan], [0.5], [0.5]])
    assert share_rows(same, offsets, slopes, 4).tolist() == [0, 1, 3, 4]


def test_rows_are_packed_in_order() -> None:
    block, out = torch.arange(6).view(2, 3), torch.full((4, 4), -1)
    names = ("out_token_ids", "out_positions", "out_slots", "requests")
    inputs = (torch.tensor([0, 1, 4]), block, block + 10, block + 20)
    pack_rows(*inputs, **dict(zip(names, out, strict=True)))
    assert out.tolist() == [[0, 3, 4, 5], [10, 13, 14, 15], [20, 23, 24, 25], [0, 1, 1, 1]]


def naive_attention(query, keys, values, visible, scale, cap, sinks):
    """One query at a time, one head at a time."""
    out = torch.zeros(*query.shape[:-1], values.shape[-1])
    group = query.shape[1] // keys.shape[1]
    for i in range(query.shape[0]):
        for h in range(query.shape[1]):
            scores = keys[:, h // group] @ query[i, h] * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            weights = scores[visible[i]].exp()
            weights /= weights.sum() + (0.0 if sinks is None else sinks[h].exp())
            out[i, h] = weights @ values[visible[i], h // group]
    return out


@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0, 2, 5])], ids=["none", "sinks"])
@pytest.mark.parametrize("cap", [0.0, 5.0], ids=["no cap", "cap"])
@pytest.mark.parametrize("window", [-1, 3], ids=["full", "window"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_paged_attention_equals_one_query_at_a_time(
    causal: bool, window: int, cap: float, sinks: torch.Tensor | None
) -> None:
    torch.manual_seed(0)
    kv_lens, width = [9, 6], 4
    keys, values = torch.randn(40, 2, 8), torch.randn(40, 2, 16)
    # a slot that no request owns poisons any result that reads it
    keys[0] = values[0] = math.nan
    slots = torch.zeros(2, 9, dtype=torch.int64)
    slots[0] = torch.arange(10, 19)
    slots[1, :6] = torch.arange(30, 36)
    query = torch.randn(2, width, 4, 8)
    positions = torch.stack([torch.arange(n - width, n) for n in kv_lens])
    out = paged_attention(
        query,
        keys,
        values,
        slots,
        torch.tensor(kv_lens),
        positions,
        scale=0.3,
        causal=causal,
        window_left=window,
        logit_cap=cap,
        sinks=sinks,
    )
    for i, kv_len in enumerate(kv_lens):
        columns = torch.arange(kv_len)
        visible = torch.ones(width, kv_len, dtype=torch.bool)
        if causal:
            visible &= columns <= positions[i][:, None]
        if window >= 0:
            visible &= columns >= positions[i][:, None] - window
        own = slots[i, :kv_len]
        expected = naive_attention(query[i], keys[own], values[own], visible, 0.3, cap, sinks)
        # fp32, sums of at most 9 terms
        torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=1e-5)


def test_context_equals_the_oracle() -> None:
    """The same keys and values as the oracle's independent drafter, from the same weights."""
    torch.manual_seed(0)
    config = DrafterConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=32,
        block_size=4,
        num_target_layers=6,
        mask_token_id=1,
        target_layer_ids=(1, 3, 4),
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=8,
        rope_theta=1000.0,
    )
    drafter = Drafter(config).requires_grad_(False)
    state = {name: torch.randn_like(tensor) for name, tensor in drafter.state_dict().items()}
    drafter.load_state_dict(state)
    features, positions = torch.randn(5, 3 * 16), torch.tensor([0, 1, 2, 7, 40])
    angles = torch.arange(64)[:, None] * 1000.0 ** (-torch.arange(4) / 4)
    slots = torch.tensor([3, 9, 4, 7, 1])
    hidden = context_hidden(
        features,
        fc_weight=state["fc.weight"],
        norm_weight=state["hidden_norm.weight"],
        eps=config.rms_norm_eps,
    )
    expected = drafter.context_kv(drafter.project(features[None]), positions[None])
    for i in range(2):
        kv_weight = torch.cat([state[f"layers.{i}.self_attn.{kv}_proj.weight"] for kv in "kv"])
        keys, values = torch.zeros(2, 12, 2, 8)
        write_context(
            (hidden @ kv_weight.T)[None],
            positions,
            slots,
            [keys],
            [values],
            k_norm_weights=[state[f"layers.{i}.self_attn.k_norm.weight"]],
            cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1),
            eps=config.rms_norm_eps,
        )
        # fp32, sums of 48 and 16 terms
        torch.testing.assert_close(keys[slots], expected.keys[i][0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(values[slots], expected.values[i][0], atol=1e-5, rtol=1e-4)
        others = [slot for slot in range(12) if slot not in slots.tolist()]
        assert not keys[others].any() and not values[others].any()


def test_the_first_of_equal_logits_wins_after_the_cap() -> None:
    """Plain decoding applies the softcap before the argmax: logits that the cap makes equal tie."""
    logits = torch.tensor([[1.0, 3.0, 3.0], [1e4, 2e4, 0.0], [-5.0, -7.0, -5.0]])
    assert argmax_rows(logits).tolist() == [1, 1, 0]
    assert argmax_rows(logits, 30.0).tolist() == [1, 0, 0]


def test_a_peak_is_the_highest_probability() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1, 0.0], [1.0, 1.0, math.nan, 0.0], [math.nan] * 4]).log()
    assert peak_probabilities(logits).tolist() == pytest.approx([0.6, 0.5, 0.0])


def test_prefixes_are_laid_end_to_end() -> None:
    table = torch.arange(40).view(4, 10)
    bounds, slots = torch.full((4,), -1), torch.full((12,), -1)
    rows, lens = torch.tensor([2, 0, 3]), torch.tensor([3, 0, 4])
    index_prefixes(table, rows, lens, bounds, slots)
    assert bounds.tolist() == [0, 3, 3, 7]
    assert slots.tolist() == [20, 21, 22, 30, 31, 32, 33, *[-1] * 5]
    starts = torch.zeros(3, dtype=torch.int32)
    index_prefixes(
        table, rows, lens, bounds, slots, window=2, starts=starts, slot_map=torch.arange(40) + 100
    )
    assert bounds.tolist() == [0, 2, 2, 4]
    assert slots[:4].tolist() == [121, 122, 132, 133]
    assert starts.tolist() == [1, 0, 2]


def test_unknown_device_is_refused_by_name() -> None:
    assert choose("cpu") is TORCH
    assert set(TORCH.describe().values()) == {"torch"}
    with pytest.raises(ValueError, match="no ops for device 'xpu'; it has cpu, cuda"):
        choose("xpu")


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (4, 1.0, [0, 1, 2, 3]),
        # the third and the fourth are tied: both are kept
        (3, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [0, 1]),
        # the first two have a mass of 0.6
        (4, 0.6001, [0, 1, 2, 3]),
        (4, 0.5999, [0, 1]),
        (4, 0.3, [0]),
        (1, 1.0, [0]),
    ],
)
def test_draws_have_the_filtered_distribution(top_k: int, top_p: float, kept: list[int]) -> None:
    probs = torch.tensor([0.4, 0.2, 0.15, 0.15, 0.1])
    temperature, times = 0.5, 20_000
    found = sample_rows(
        (probs.log() * temperature).expand(times, -1),
        make_noise(temperature, rows=times),
        temperatures=torch.tensor([temperature]),
        top_ks=torch.tensor([top_k]),
        top_ps=torch.tensor([top_p]),
    )
    counts = torch.bincount(found, minlength=5)
    assert counts[kept].sum() == times
    shares = probs[kept].double() / probs[kept].double().sum()
    assert len(kept) == 1 or chisquare(counts[kept], times * shares).pvalue > 1e-3


def make_noise(scale: float, *, rows: int) -> Noise:
    generator = torch.Generator().manual_seed(0)
    keys = torch.empty(1, rows, dtype=torch.int64).random_(generator=generator)
    return Noise(keys, torch.tensor([scale]))


def test_the_highest_after_noise_is_a_draw_at_its_temperature() -> None:
    """Gumbel-max over a real-size vocabulary, in bins of equal mass with many tokens each."""
    times, width, bins = 4000, 49_152, 32
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(width, generator=generator) * 2
    temperature = 0.8
    order = torch.randperm(width, generator=generator)
    share = torch.softmax(logits / temperature, -1)[order].cumsum(0)
    bin_of = torch.empty(width, dtype=torch.int64)
    bin_of[order] = (share * bins).long().clamp(max=bins - 1)
    noise = make_noise(temperature, rows=times)
    found = torch.cat(
        [
            argmax_rows(logits.expand(len(keys), -1), 0.0, Noise(keys[None], noise.scales))
            for keys in noise.keys[0].split(250)
        ]
    )
    expected = torch.zeros(bins, dtype=torch.float64)
    expected.index_add_(0, bin_of, torch.softmax(logits.double() / temperature, -1))
    assert chisquare(bin_of[found].bincount(minlength=bins), times * expected).pvalue > 1e-3


@pytest.mark.parametrize("near", ["columns", "rows", "keys that differ by one"])
def test_noise_is_gumbel_noise_and_independent_of_its_neighbour(near: str) -> None:
    keys = make_noise(1.0, rows=400).keys[0]
    noise = gumbel(keys, 3001)
    assert kstest(noise.flatten()[::7], "gumbel_r").pvalue > 1e-3
    pairs = {
        "columns": (noise[:, :-1], noise[:, 1:]),
        "rows": (noise[:-1], noise[1:]),
        "keys that differ by one": (noise, gumbel(keys + 1, 3001)),
    }[near]
    one, two = (each.flatten() for each in pairs)
    # for a million independent pairs the correlation is almost certainly within 0.004
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.005


def test_blocks_are_kept_as_the_oracle_keeps_them() -> None:
    """First tokens follow the target's distribution, and accept lengths follow those of the oracle,
    which takes one block at a time. Each side samples its own drafts."""
    times, width, temperature = 4000, 4, 0.8
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(width, 6, generator=generator)
    near = logits[:-1] + torch.randn(width - 1, 6, generator=generator)
    rule = BlockRule(temperature, seed=3)
    by_one = [rule.commit(logits, rule.draft(near)) for _ in range(times)]

    keys = torch.empty(times, width, dtype=torch.int64).random_(generator=generator)
    noise = Noise(keys, torch.full((times,), temperature))
    draft_logits = near.expand(times, -1, -1)
    both = argmax_and_sample(draft_logits.flatten(0, 1), 0.0, noise)
    argmax_drafts, sampled_drafts = both.view(2, times, -1)
    choices, num_correct, _ = reject_by_block(
        logits.expand(times, -1, -1),
        draft_logits,
        sampled_drafts,
        argmax_drafts,
        noise,
        torch.rand(times, width - 1, generator=generator),
        is_sampled=torch.ones(times, dtype=torch.bool),
    )
    expected = torch.softmax(logits[0].double() / temperature, -1) * times
    firsts = (torch.tensor([tokens[0] for tokens in by_one]), choices[:, 0])
    for first in firsts:
        assert chisquare(first.bincount(minlength=6), expected).pvalue > 1e-3
    lengths = torch.tensor([len(tokens) for tokens in by_one]), num_correct + 1
    counts = torch.stack([each.bincount(minlength=width + 1)[1:] for each in lengths])
    assert counts.min() > 100
    assert chi2_contingency(counts).pvalue > 1e-3
