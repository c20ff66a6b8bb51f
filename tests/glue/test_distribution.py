"""Unseeded sampling: committed tokens are distributed as plain decoding would sample them.

The next token of the toy target depends only on the last one, so the exact probability of every
pair of tokens is known. SGLang's sampler or ours, and our acceptance, run on 40,000 chains at once.
Drafts are argmax or sampled. Sampled drafts are kept by block verification, or with top_k where
they match the target's samples, which share their noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from sglang_dflash.accept import accept, decide
from sglang_dflash.buffers import StepRandomness
from sglang_dflash.glue import compat
from sglang_dflash.glue.models.heads import VerifyHead
from sglang_dflash.glue.sampling.penalties import PenaltyTable
from sglang_dflash.glue.sampling.plan import plan_of
from sglang_dflash.glue.sampling.row_sampler import RowSampler
from sglang_dflash.kernels import COUNT_MATCHES, TORCH, Noise
from sglang_dflash.kernels.sampling import reference as sampling_reference
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.types import (
    DraftBlock,
    DraftContext,
    DraftOutput,
    Proposal,
    Randomness,
    SampledDrafts,
    SamplingPlan,
    TargetOutput,
)

CHAINS, VOCAB, WIDTH = 40_000, 12, 4
ALL = 1 << 30

CASES = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top_k 8, top_p 0.9": {"temperature": 1.0, "top_k": 8, "top_p": 0.9},
    "min_p 0.1": {"temperature": 1.0, "min_p": 0.1},
}
SAMPLED = ("temperature 1", "temperature 0.7", "top_k 8, top_p 0.9")


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's sampler without a server: the methods are real, the settings are those of a CPU."""
    from sglang.srt.layers import sampler as module

    settings = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(module, "get_exec", lambda: settings)
    found = module.Sampler.__new__(module.Sampler)
    torch.nn.Module.__init__(found)
    found.rl_on_policy_target = None
    found.enable_deterministic = found.use_log_softmax_logprob = found.use_ascend_backend = False
    return found


def make_batch(options: dict[str, float]) -> Any:
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = {"top_p": 1.0, "top_k": ALL, "min_p": 0.0} | options
    info = SimpleNamespace(
        temperatures=torch.full((CHAINS, 1), params["temperature"]),
        top_ps=torch.full((CHAINS,), params["top_p"]),
        top_ks=torch.full((CHAINS,), params["top_k"], dtype=torch.int32),
        min_ps=torch.full((CHAINS,), params["min_p"]),
        sampling_seed=None,
        logit_bias=None,
        is_all_greedy=False,
        need_top_p_sampling=params["top_p"] != 1.0,
        need_top_k_sampling=params["top_k"] != ALL,
        need_min_p_sampling=params["min_p"] > 0,
        has_custom_logit_processor=False,
        return_sampling_masks=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
        has_watermark_candidates=False,
        max_top_k=None,
        grammars=None,
    )
    return SimpleNamespace(
        sampling_info=info,
        reqs=[SimpleNamespace(sampling_params=SamplingParams(**params))],
        has_grammar=False,
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
    )


class Toy:
    """Two decode steps of every chain, through our stages."""

    def __init__(self, sampler: Any, options: dict[str, float]) -> None:
        torch.manual_seed(0)
        self.logits = torch.randn(VOCAB, VOCAB) * 1.5
        self.batch = make_batch(options)
        # no real target, so no logits in the dtype of its head
        head = VerifyHead(torch.nn.Identity(), TORCH, device_type="cpu")
        self.row_sampler = RowSampler(sampler, head, PenaltyTable(VOCAB, "cpu"))
        # SGLang's sampler is used if one is given
        self.is_ours = sampler is None
        self.randomness = StepRandomness(CHAINS, WIDTH, "cpu")
        self.policy = DraftPolicy(CHAINS, "cpu")
        self.change: Callable[[SampledDrafts], SampledDrafts] = lambda drafts: drafts
        # without an error, the drafter would sample exactly the target's tokens
        self.error = torch.randn(VOCAB) if sampler is None else torch.zeros(VOCAB)
        self.sharpness = 1.0

    def step(self, anchors: torch.Tensor, *, greedy_after_first: bool = False) -> Any:
        """Draft a chain, verify, decide, learn; return the commit."""
        plan = plan_of(self.batch) if self.is_ours else None
        randomness = self.randomness.draw(plan)
        argmax_drafts, _ = self.chain(anchors, None)
        rows, drafts, verified = torch.arange(CHAINS), None, argmax_drafts
        if randomness is not None:
            sampled_drafts, logits = self.chain(anchors, randomness)
            output = DraftOutput(argmax_drafts, sampled_drafts, logits)
            drafts = self.change(self.policy.select(rows, output, randomness))
            verified = drafts.verified
        token_ids = torch.cat([anchors[:, None], verified], dim=1)
        positions = torch.arange(WIDTH).expand(CHAINS, WIDTH)
        block = DraftBlock(token_ids=token_ids, positions=positions, slots=positions)
        context = DraftContext(anchors=anchors, lens=torch.zeros_like(anchors), request_rows=rows)
        found = compat.LogitsProcessorOutput(next_token_logits=self.logits[token_ids.flatten()])
        choices = None
        if plan is None:
            choices = self.row_sampler.choose(self.batch, found, context, block)
        if greedy_after_first:
            assert choices is not None
            choices[:, 1:] = self.logits[token_ids[:, 1:]].argmax(-1)
        target = TargetOutput(token_ids, choices=choices, logits=found.next_token_logits)
        verdict = decide(TORCH, plan, Proposal(block, drafts), target)
        commit = accept(TORCH, context, Proposal(block, drafts), verdict)
        if randomness is not None:
            assert verdict.advantage is not None
            scales = randomness.scales
            self.policy.learn(rows, verdict.advantage, temperatures=scales, lens=commit.lens)
        return commit

    def chain(
        self, anchors: torch.Tensor, randomness: Randomness | None
    ) -> tuple[torch.Tensor, ...]:
        """Return the drafted tokens after anchors, [b, B - 1], and their logits, [b, B - 1, V]."""
        tokens, seen = [anchors], []
        for i in range(WIDTH - 1):
            shared = randomness and Noise(randomness.keys[:, i : i + 1], randomness.scales)
            seen.append(self.logits[tokens[-1]] * self.sharpness + self.error)
            tokens.append(TORCH.argmax_rows(seen[-1], noise=shared))
        return torch.stack(tokens[1:], dim=1), torch.stack(seen, dim=1)

    def is_sampled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return which requests verify sampled drafts under the current policy."""
        nothing = torch.zeros(len(rows), WIDTH - 1, dtype=torch.int64)
        randomness = Randomness(nothing, nothing, nothing)
        return self.policy.select(rows, DraftOutput(nothing, nothing), randomness).is_sampled

    def pairs(self, *, greedy_after_first: bool = False) -> torch.Tensor:
        """Return how often each pair of first tokens after token 0 came, [V * V]."""
        start = torch.zeros(CHAINS, dtype=torch.int64)
        one = self.step(start, greedy_after_first=greedy_after_first)
        two = self.step(one.bonus, greedy_after_first=greedy_after_first)
        first = one.token_ids[:, 0]
        second = torch.where(one.lens > 1, one.token_ids[:, 1], two.token_ids[:, 0])
        # both ways to a second token must occur, or half of the rule is untested
        assert 0.1 < (one.lens > 1).float().mean() < 0.9
        return torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB)


def exact_pairs(logits: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
    """Return the probability of each pair, from the definition of each filter."""
    probs = torch.softmax(logits.double() / options["temperature"], dim=-1)
    for row in probs:
        order = row.argsort(descending=True)
        ranked = row[order].clone()
        before = ranked.cumsum(0) - ranked
        keep = torch.arange(VOCAB) < options.get("top_k", ALL)
        keep &= before <= options.get("top_p", 1.0)
        keep &= ranked >= options.get("min_p", 0.0) * ranked[0]
        row[order] = torch.where(keep, ranked, 0.0)
        row /= row.sum()
    return (probs[0][:, None] * probs).flatten()


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a filtered pair was sampled"
    wanted = expected[possible] * counts.sum()
    # cells with an expected count below five are pooled, as the chi-squared test requires
    rare = wanted < 5
    found = torch.cat([counts[possible][~rare], counts[possible][rare].sum()[None]]).double()
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    keep = wanted > 0
    return chisquare(found[keep], wanted[keep] * (found.sum() / wanted.sum())).pvalue


@pytest.mark.parametrize("name", CASES)
def test_pairs_of_tokens_are_distributed_as_plain_decoding(sampler: Any, name: str) -> None:
    toy = Toy(sampler, CASES[name])
    assert p_value(toy.pairs(), exact_pairs(toy.logits, CASES[name])) > 1e-3


@pytest.mark.parametrize("name", SAMPLED)
def test_so_are_pairs_whose_drafts_are_sampled(name: str) -> None:
    """The torch twins of our kernels sample here, not SGLang's sampler."""
    toy = Toy(None, CASES[name])
    assert p_value(toy.pairs(), exact_pairs(toy.logits, CASES[name])) > 1e-3


@pytest.mark.parametrize("name", ["temperature 0.7", "top_k 8, top_p 0.9"])
def test_so_are_pairs_of_a_drafter_that_lacks_tokens(name: str) -> None:
    """With a head of its own a drafter proposes some tokens only; the target samples all."""
    toy = Toy(None, CASES[name])
    toy.error[::3] = float("-inf")
    assert p_value(toy.pairs(), exact_pairs(toy.logits, CASES[name])) > 1e-3


def test_requests_of_every_kind_are_sampled_side_by_side() -> None:
    """One third each is greedy, samples with top_k 8, and samples unfiltered."""
    toy = Toy(None, CASES["temperature 1"])
    kinds = [{"temperature": 1.0, "top_k": 1}, CASES["top_k 8, top_p 0.9"], CASES["temperature 1"]]
    infos = [make_batch(options) for options in kinds]
    info = toy.batch.sampling_info
    for name in ("temperatures", "top_ps", "top_ks"):
        parts = [getattr(each.sampling_info, name) for each in infos]
        setattr(info, name, torch.cat([p[i::3] for i, p in enumerate(parts)]))
    toy.batch.reqs = [each.reqs[0] for each in infos]
    plan = plan_of(toy.batch)
    randomness = toy.randomness.draw(plan)
    assert plan is not None and plan.any_top_k and plan.any_unfiltered and randomness is not None
    logits = (toy.logits[0] + toy.error).expand(CHAINS, WIDTH - 1, -1)
    noise = Noise(randomness.keys, randomness.scales)
    both = TORCH.argmax_and_sample(logits.flatten(0, 1), 0.0, noise).view(2, CHAINS, -1)
    drafts = toy.policy.select(torch.arange(CHAINS), DraftOutput(*both, logits), randomness)
    block = DraftBlock(*(torch.zeros(CHAINS, WIDTH, dtype=torch.int64) for _ in range(3)))
    target = TargetOutput(block.slots, logits=toy.logits[0].expand(CHAINS * WIDTH, -1))
    verdict = decide(TORCH, plan, Proposal(block, drafts), target)
    found, kept = verdict.choices, verdict.num_correct
    assert kept is not None
    sizes = [len(range(i, CHAINS, 3)) for i in range(3)]
    greedy, top_k, unfiltered = found.split(sizes)
    assert (greedy == toy.logits[0].argmax()).all()
    # for unfiltered requests, rows after a rejected draft are meaningless
    for sampled, options in ((top_k.flatten(), kinds[1]), (unfiltered[:, 0], kinds[2])):
        expected = exact_pairs(toy.logits, options).view(VOCAB, VOCAB).sum(1)
        assert p_value(torch.bincount(sampled, minlength=VOCAB), expected) > 1e-3
    walked = (drafts.verified == found[:, :-1]).long().cumprod(1).sum(1)
    by_block = torch.arange(CHAINS) >= sizes[0] + sizes[1]
    assert ((kept == COUNT_MATCHES) == ~by_block).all()
    token_ids = torch.cat([block.token_ids[:, :1], drafts.verified], dim=1)
    lens, *_ = TORCH.accept_block(token_ids, found, block.slots[:, 0], block.slots, kept)
    assert (lens - 1 == walked)[~by_block].all() and (lens - 1 <= walked).all()


def test_whole_blocks_keep_more_than_shared_noise_and_that_more_than_other_noise() -> None:
    toy = Toy(None, CASES["temperature 1"])
    start = torch.zeros(CHAINS, dtype=torch.int64)

    def mean_length(change: Callable[[SampledDrafts], SampledDrafts]) -> float:
        toy.change = change
        return float(toy.step(start).lens.float().mean())

    by_block = mean_length(lambda drafts: drafts)
    shared = mean_length(lambda drafts: replace(drafts, draft_logits=None))
    other = mean_length(
        lambda drafts: replace(
            drafts,
            draft_logits=None,
            randomness=replace(drafts.randomness, keys=drafts.randomness.keys.flip(0)),
        )
    )
    assert by_block > 1.05 * shared > 1.05 * 1.3 * other


@pytest.mark.parametrize(
    ("temperature", "sharpness", "sampled_is_better"), [(0.7, 1.0, True), (0.3, 0.1, False)]
)
def test_drafts_follow_what_was_right_so_far(
    temperature: float, sharpness: float, sampled_is_better: bool
) -> None:
    """A drafter that is less certain than the target does better with argmax drafts. Either way,
    the distribution of the tokens is unchanged."""
    options = {"temperature": temperature}
    toy = Toy(None, options)
    toy.sharpness, toy.error = sharpness, sharpness * toy.error
    anchors = torch.zeros(CHAINS, dtype=torch.int64)
    lens = []
    for _ in range(12):
        commit = toy.step(anchors)
        anchors = commit.bonus
        lens.append(float(commit.lens.float().mean()))
    rows = torch.arange(CHAINS)
    share = toy.is_sampled(rows).float().mean()
    assert share > 0.9 if sampled_is_better else share < 0.1
    # all started with sampled drafts
    assert sampled_is_better or lens[-1] > 1.2 * lens[0]
    assert p_value(toy.pairs(), exact_pairs(toy.logits, options)) > 1e-3
    # a new request starts like others of its temperature, or with sampled drafts if it is the first
    rows = rows[:2]
    toy.policy.start(rows, torch.tensor([temperature, 1.5]))
    assert toy.is_sampled(rows).tolist() == [sampled_is_better, True]


def test_the_check_sees_noise_that_two_rows_share() -> None:
    toy = Toy(None, CASES["temperature 1"])
    draw = toy.randomness.draw

    def draw_one_key(plan: SamplingPlan | None) -> Randomness | None:
        randomness = draw(plan)
        assert randomness is not None
        randomness.keys[:] = randomness.keys[:, :1].clone()
        return randomness

    toy.randomness.draw = draw_one_key  # type: ignore[method-assign]
    assert p_value(toy.pairs(), exact_pairs(toy.logits, CASES["temperature 1"])) < 1e-6


def test_the_check_sees_drafts_that_are_kept_by_their_own_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling_reference, "SALT", 0)
    toy = Toy(None, CASES["temperature 1"])
    assert p_value(toy.pairs(), exact_pairs(toy.logits, CASES["temperature 1"])) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"sampling_seed": torch.zeros(CHAINS)},
        {"need_min_p_sampling": True},
        {"logit_bias": torch.zeros(1)},
        {"is_all_greedy": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_our_kernels_cannot_sample_gets_no_noise(change: dict[str, Any]) -> None:
    toy = Toy(None, CASES["temperature 1"])
    assert toy.randomness.draw(plan_of(toy.batch)) is not None
    assert toy.randomness.for_batch(3).scales.tolist() == [1.0] * 3
    for name, value in change.items():
        setattr(toy.batch.sampling_info, name, value)
    assert toy.randomness.draw(plan_of(toy.batch)) is None
    # the noise that a captured graph keeps reading has no effect
    assert toy.randomness.for_batch(3).scales.tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["temperature 1"])
def test_the_check_sees_a_wrong_rule(sampler: Any, name: str) -> None:
    """The wrong rule samples the first row only and takes the argmax token after it."""
    toy = Toy(sampler, CASES[name])
    counts = toy.pairs(greedy_after_first=True)
    assert p_value(counts, exact_pairs(toy.logits, CASES[name])) < 1e-6


def test_the_check_sees_an_ignored_filter(sampler: Any) -> None:
    toy = Toy(sampler, {"temperature": 1.0})
    with pytest.raises(AssertionError, match="a filtered pair was sampled"):
        p_value(toy.pairs(), exact_pairs(toy.logits, CASES["min_p 0.1"]))
