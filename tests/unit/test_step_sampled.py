"""A sampled step on a fake engine commits tokens distributed as the target alone samples them.

The host is minimal: a drafter and a target whose logits depend only on the position in the block.
Nothing of SGLang is imported; stage 3 accepts or rejects every draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from sglang_dflash.buffers import StepBuffers
from sglang_dflash.kernels import TORCH, Noise
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.reference.rejection import BlockRule
from sglang_dflash.step import decode_step, undrafted_step
from sglang_dflash.types import (
    Commit,
    DraftContext,
    DraftOutput,
    RowShare,
    SamplingPlan,
    TargetOutput,
)
from tests.unit.test_step import B, config

VOCAB, REQUESTS, TEMPERATURE = 6, 4000, 0.8
UNFILTERED = 1 << 30


class SamplingHost:
    """A drafter close to its target, and requests with the sampling parameters of the plan."""

    def __init__(self, plan: SamplingPlan | None, *, sees_all: bool = True) -> None:
        generator = torch.Generator().manual_seed(2)
        self.target = torch.randn(B, VOCAB, generator=generator)
        error = torch.randn(B - 1, VOCAB, generator=generator)
        self.drafter = self.target[:-1] + 0.6 * error
        self.plan = plan
        self.sees_all = sees_all
        self.recorded: list[Commit] = []
        # of each request's drafts, where rows are shared; whatever was drawn
        self.confidence = torch.rand(REQUESTS, B - 1, generator=generator)
        self.looks_at_drafts = False
        self.passes = 0

    def slot_table(self):
        return torch.arange(64).expand(REQUESTS, 64)

    def mark(self):
        pass

    def sampling_plan(self):
        return self.plan

    def request_ids(self):
        raise AssertionError("only a simulation asks for them")

    def plan_verify(self, block):
        pass

    def draft_tokens(self, context, masked, randomness, *, wanted, with_confidence=False):
        logits = self.drafter.expand(REQUESTS, -1, -1)
        argmax_drafts = logits.argmax(-1)
        if randomness is None or not self.sees_all:
            return DraftOutput(argmax_drafts, argmax_drafts, confidence=self.confidence)
        noise = Noise(randomness.keys, randomness.scales)
        both = TORCH.argmax_and_sample(logits.flatten(0, 1), 0.0, noise)
        self.drafted = both[1].view(REQUESTS, -1)
        confidence = self.confidence
        if self.looks_at_drafts:
            confidence = logits.softmax(-1).gather(-1, self.drafted[..., None])[..., 0]
        return DraftOutput(*both.view(2, REQUESTS, -1), logits, confidence)

    def verify_block(self, context, block, plan):
        # the next row in each pass of a step without drafts
        rows = self.target[self.passes : self.passes + block.token_ids.shape[1]]
        if block.shared is None:
            logits = rows.repeat(REQUESTS, 1)
        else:
            self.rows = block.shared.bounds.diff()
            logits = rows[block.shared.columns()]
        return TargetOutput(features=block.rows.token_ids[:, None].float(), logits=logits)

    def begin_pass(self, lens):
        self.passes += 1

    def agree(self, *decisions):
        pass

    def advance_states(self, commit):
        pass

    def publish(self, new_lens):
        pass

    def write_draft_kv(self, features, positions, slots):
        pass

    def record(self, commit):
        self.recorded.append(commit)

    def step(
        self,
        policy: DraftPolicy | None = None,
        *,
        width: int = B,
        seed: int = 4,
        share: RowShare | None = None,
    ) -> Commit:
        torch.manual_seed(seed)
        zeros = torch.zeros(REQUESTS, dtype=torch.int64)
        context = DraftContext(anchors=zeros, lens=zeros + 5, request_rows=torch.arange(REQUESTS))
        buffers = StepBuffers(max_requests=REQUESTS, block_size=B, device="cpu")
        return decode_step(
            self,
            TORCH,
            context,
            width=width,
            share=share,
            buffers=buffers,
            policy=policy or DraftPolicy(REQUESTS, "cpu"),
            config=config(),
            simulation=None,
        )

    def undrafted(self, passes: int) -> Commit:
        torch.manual_seed(4)
        zeros = torch.zeros(REQUESTS, dtype=torch.int64)
        return undrafted_step(
            self,
            TORCH,
            DraftContext(anchors=zeros, lens=zeros + 5, request_rows=torch.arange(REQUESTS)),
            passes=passes,
            buffers=StepBuffers(max_requests=REQUESTS, block_size=B, device="cpu"),
            config=config(),
        )

    def tokens_by_definition(self) -> list[list[int]]:
        """Return what the oracle commits, one block at a time."""
        rule = BlockRule(TEMPERATURE, seed=3)
        return [rule.commit(self.target, rule.draft(self.drafter)) for _ in range(REQUESTS)]

    def distribution(self, row: int, *, top_k: int = VOCAB) -> torch.Tensor:
        probs = torch.softmax(self.target[row].double() / TEMPERATURE, -1)
        kept = torch.where(probs >= probs.topk(top_k).values[-1], probs, 0.0)
        return kept / kept.sum()


def make_plan(*top_ks: int) -> SamplingPlan:
    """Return a plan whose requests cycle through these top_k."""
    by_request = torch.tensor(top_ks).repeat(REQUESTS)[:REQUESTS]
    return SamplingPlan(
        temperatures=torch.full((REQUESTS,), TEMPERATURE),
        top_ks=by_request,
        top_ps=torch.ones(REQUESTS),
        any_top_k=any(1 < top_k <= 128 for top_k in top_ks),
        any_unfiltered=any(top_k > 128 for top_k in top_ks),
    )


def assert_drawn_from(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    counts = tokens.bincount(minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    possible = probs > 0
    assert chisquare(counts[possible], probs[possible] * len(tokens)).pvalue > 1e-3


def test_a_sampled_step_commits_what_the_oracle_commits() -> None:
    """First tokens follow the target's distribution, and accept lengths follow the oracle's."""
    host = SamplingHost(make_plan(UNFILTERED))
    commit = host.step()
    assert_drawn_from(commit.token_ids[:, 0], host.distribution(0))
    lens = torch.tensor([len(tokens) for tokens in host.tokens_by_definition()])
    counts = torch.stack([each.bincount(minlength=B + 1)[1:] for each in (commit.lens, lens)])
    assert counts.min() > 100
    assert chi2_contingency(counts).pvalue > 1e-3


def test_behind_a_block_that_is_kept_whole_the_bonus_is_a_plain_draw() -> None:
    """Nothing was rejected there, so no residual distribution may apply."""
    host = SamplingHost(make_plan(UNFILTERED))
    commit = host.step()
    is_whole = commit.lens == B
    assert_drawn_from(commit.bonus[is_whole], host.distribution(B - 1))
    assert (commit.token_ids[is_whole, B - 1] == commit.bonus[is_whole]).all()


def commit_by(host: SamplingHost, narrow: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the first committed token of each request, [b]; `narrow` says from the drafted tokens
    [b, B - 1] which requests verify none of their drafts."""
    wide = host.step(seed=5)
    is_narrow = narrow(host.drafted)
    assert 0.1 < is_narrow.float().mean() < 0.9
    # the same seed draws the same drafts and the same noise
    return torch.where(is_narrow, host.step(seed=5, width=1).bonus, wide.token_ids[:, 0])


@pytest.mark.parametrize("top_k", [3, UNFILTERED])
@pytest.mark.parametrize("width", range(1, B + 1))
def test_tokens_follow_the_target_at_every_width(width: int, top_k: int) -> None:
    """The first token, and the token after a block that is kept whole."""
    host = SamplingHost(make_plan(top_k))
    commit = host.step(width=width, seed=width)
    is_whole = commit.lens == width
    assert is_whole.any()
    kept = min(top_k, VOCAB)
    assert_drawn_from(commit.token_ids[:, 0], host.distribution(0, top_k=kept))
    assert_drawn_from(commit.bonus[is_whole], host.distribution(width - 1, top_k=kept))


@pytest.mark.parametrize("top_k", [3, UNFILTERED])
def test_every_pass_of_a_step_draws_from_the_target_anew(top_k: int) -> None:
    """Noise that two passes shared would make the second token depend on the first."""
    host = SamplingHost(make_plan(top_k))
    tokens = host.undrafted(3).token_ids
    for row in range(3):
        assert_drawn_from(tokens[:, row], host.distribution(row, top_k=min(top_k, VOCAB)))
    for one, other in ((0, 1), (1, 2), (0, 2)):
        pairs = (VOCAB * tokens[:, one] + tokens[:, other]).bincount(minlength=VOCAB**2)
        counts = pairs.view(VOCAB, VOCAB)
        counts = counts[counts.sum(1) > 50][:, counts.sum(0) > 50]
        assert chi2_contingency(counts).pvalue > 1e-3


def test_a_cut_that_does_not_look_at_the_drafts_changes_nothing() -> None:
    host = SamplingHost(make_plan(UNFILTERED))
    by_number = torch.arange(REQUESTS) % 3 == 0
    assert_drawn_from(commit_by(host, lambda _drafted: by_number), host.distribution(0))


# half of the rows that drafts could take, as confidences are
HALF = RowShare(REQUESTS + REQUESTS * (B - 1) // 2, torch.zeros(B - 1), torch.ones(B - 1))


@pytest.mark.parametrize("width", [B - 1, B])
@pytest.mark.parametrize("top_k", [3, UNFILTERED])
def test_tokens_follow_the_target_however_rows_are_shared(top_k: int, width: int) -> None:
    """The first token, and the token after a request's last row."""
    host = SamplingHost(make_plan(top_k))
    num_rows = min(HALF.num_rows, REQUESTS * width - 500)
    commit = host.step(width=width, share=replace(HALF, num_rows=num_rows))
    assert host.rows.sum() == num_rows and (commit.lens <= host.rows).all()
    kept = min(top_k, VOCAB)
    assert_drawn_from(commit.token_ids[:, 0], host.distribution(0, top_k=kept))
    for rows in range(1, width + 1):
        has_all = (commit.lens == host.rows) & (host.rows == rows)
        assert has_all.sum() > 50
        assert_drawn_from(commit.bonus[has_all], host.distribution(rows - 1, top_k=kept))


@pytest.mark.parametrize("sees_all", [True, False], ids=["whole vocabulary", "a part of it"])
def test_shared_rows_of_greedy_top_k_and_unfiltered_requests(sees_all: bool) -> None:
    host = SamplingHost(make_plan(1, 3, UNFILTERED), sees_all=sees_all)
    commit = host.step(share=HALF)
    expected = host.target.argmax(-1)
    agreed = int((host.drafter.argmax(-1) == expected[:-1]).int().cumprod(0).sum())
    assert torch.equal(commit.lens[::3], host.rows[::3].clamp(max=agreed + 1).int())
    for tokens, length in zip(commit.token_ids[::3], commit.lens[::3], strict=True):
        assert torch.equal(tokens[:length], expected[:length])
    for kind, top_k in ((1, 3), (2, VOCAB)):
        assert_drawn_from(commit.token_ids[kind::3, 0], host.distribution(0, top_k=top_k))
        assert commit.lens[kind::3].unique().numel() > 1


def test_rows_shared_by_the_drawn_token_are_caught() -> None:
    """The reason why confidence is the peak of the drafter's distribution, and never the
    probability of the draft that was drawn from it."""
    host = SamplingHost(make_plan(UNFILTERED))
    host.looks_at_drafts = True
    commit = host.step(share=HALF)
    with pytest.raises(AssertionError):
        assert_drawn_from(commit.token_ids[:, 0], host.distribution(0))


def test_a_cut_that_looks_at_the_drawn_token_is_caught() -> None:
    """The reason for the rule that widths depend on earlier steps only: dropping a draft because of
    what it is takes its share of the acceptance away, which the residual does not give back."""
    host = SamplingHost(make_plan(UNFILTERED))
    likeliest = host.drafter[0].argmax()
    tokens = commit_by(host, lambda drafted: drafted[:, 0] == likeliest)
    with pytest.raises(AssertionError):
        assert_drawn_from(tokens, host.distribution(0))


@pytest.mark.parametrize("sees_all", [True, False], ids=["whole vocabulary", "a part of it"])
def test_greedy_top_k_and_unfiltered_requests_are_decided_side_by_side(sees_all: bool) -> None:
    host = SamplingHost(make_plan(1, 3, UNFILTERED), sees_all=sees_all)
    commit = host.step()
    greedy, top_k, unfiltered = (commit.token_ids[i::3] for i in range(3))
    lens = commit.lens[::3]
    expected = host.target.argmax(-1)
    agreed = int((host.drafter.argmax(-1) == expected[:-1]).int().cumprod(0).sum())
    assert 0 < agreed < B - 1 and (lens == agreed + 1).all()
    assert (greedy[:, : agreed + 1] == expected[: agreed + 1]).all()
    assert_drawn_from(top_k[:, 0], host.distribution(0, top_k=3))
    assert_drawn_from(unfiltered[:, 0], host.distribution(0))
    # accept lengths must vary, or half of the rule is untested
    for kind in range(1, 3):
        assert commit.lens[kind::3].unique().numel() > 1


def test_without_a_plan_the_argmax_of_each_row_is_chosen() -> None:
    host = SamplingHost(None)
    commit = host.step()
    expected = host.target.argmax(-1)
    length = int(commit.lens[0])
    assert (commit.lens == length).all()
    assert (commit.token_ids[:, :length] == expected[:length]).all()


def test_a_step_tells_the_policy_and_the_host_once_what_was_committed() -> None:
    host = SamplingHost(make_plan(UNFILTERED))
    policy = DraftPolicy(REQUESTS, "cpu")
    learnt = []
    learn = policy.learn

    def note(rows, advantage, *, temperatures, lens):
        learnt.append(lens)
        assert not host.recorded, "the host hears last"
        learn(rows, advantage, temperatures=temperatures, lens=lens)

    policy.learn = note  # type: ignore[method-assign]
    commit = host.step(policy)
    assert learnt == [commit.lens] and host.recorded == [commit]


def test_a_policy_that_learns_keeps_more_drafts() -> None:
    """A drafter that is uncertain where the target is not does better with argmax drafts."""
    host = SamplingHost(make_plan(UNFILTERED))
    host.target, host.drafter = host.target * 8, host.target[:-1] * 0.1
    policy = DraftPolicy(REQUESTS, "cpu")
    first, *_, last = (host.step(policy).lens.float().mean() for _ in range(4))
    assert last > 1.2 * first
