"""The order and the data of a step, on a minimal host that fakes the engine."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.buffers import StepBuffers
from sglang_dflash.config import DFlashConfig, DrafterSpec, Overlap
from sglang_dflash.kernels import TORCH
from sglang_dflash.policy import DraftPolicy
from sglang_dflash.simulate import SteadyAcceptance
from sglang_dflash.step import decode_step, prefill_step, undrafted_step
from sglang_dflash.types import DraftContext, DraftOutput, RowShare, TargetOutput

B = 4
# the second request is surer of its first two drafts
CONFIDENCE = [[0.6, 0.5, 0.4], [0.9, 0.8, 0.3]]


def config() -> DFlashConfig:
    drafter = DrafterSpec.from_config(
        {
            "architectures": ["DFlashDraftModel"],
            "hidden_size": 8,
            "intermediate_size": 16,
            "vocab_size": 100,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "block_size": B,
            "dflash_config": {"mask_token_id": 99, "target_layer_ids": [1]},
        },
        name="drafter",
    )
    return DFlashConfig(
        drafter,
        B,
        context_len=64,
        device="cpu",
        draft_backend="torch_native",
        overlap=Overlap(False, False, "test"),
    )


class CountingHost:
    """A target that counts up, and a drafter that counts correctly up to a limit."""

    def __init__(self, right_until: list[int]) -> None:
        self.right_until = right_until
        self.events: list[str] = []
        self.written: dict[int, float] = {}
        self.marks = 0
        # what the first rank decides, in the order of the decisions; None if this is the first
        self.decided: list[torch.Tensor] | None = None

    def slot_table(self):
        return torch.arange(2 * 64).view(2, 64)

    def sampling_plan(self):
        return None

    def request_ids(self):
        return ["one", "other"]

    def plan_verify(self, block):
        self.events.append("plan")

    def draft_tokens(self, context, masked, randomness, *, wanted, with_confidence=False):
        self.events.append("draft")
        assert masked.token_ids.shape[1] == B, "the drafter always sees a full block"
        assert (masked.token_ids[:, 1:] == 99).all()
        drafts = context.anchors[:, None] + torch.arange(1, B)
        for row, limit in enumerate(self.right_until):
            drafts[row, limit:] = 0
        confidence = torch.tensor(CONFIDENCE) if with_confidence else None
        return DraftOutput(drafts, drafts, confidence=confidence)

    def verify_block(self, context, block, plan):
        self.events.append("verify")
        token_ids = block.token_ids if block.shared is None else block.shared.token_ids
        features = token_ids.flatten()[:, None].float()
        return TargetOutput(choices=token_ids + 1, features=features)

    def mark(self):
        self.marks += 1

    def begin_pass(self, lens):
        self.events.append(f"begin {lens.tolist()}")

    def agree(self, *decisions):
        for decision in decisions if self.decided is not None else ():
            decision.copy_(self.decided.pop(0))

    def advance_states(self, commit):
        self.events.append(f"advance {commit.lens.tolist()}")

    def publish(self, new_lens):
        self.events.append(f"publish {new_lens.tolist()}")

    def write_draft_kv(self, features, positions, slots):
        self.events.append("write")
        self.written.update(zip(slots.tolist(), features[:, 0].tolist(), strict=True))

    def record(self, commit):
        self.events.append("record")


def run(
    right_until: list[int],
    simulation: SteadyAcceptance | None = None,
    width: int = B,
    num_rows: int | None = None,
    decided: list[torch.Tensor] | None = None,
):
    share = None
    if num_rows is not None:
        share = RowShare(num_rows, torch.zeros(B - 1), torch.ones(B - 1))
    host = CountingHost(right_until)
    host.decided = decided
    context = DraftContext(
        anchors=torch.tensor([10, 50]), lens=torch.tensor([5, 7]), request_rows=torch.tensor([0, 1])
    )
    buffers = StepBuffers(max_requests=4, block_size=B, device="cpu")
    return host, decode_step(
        host,
        TORCH,
        context,
        width=width,
        share=share,
        buffers=buffers,
        policy=DraftPolicy(4, "cpu"),
        config=config(),
        simulation=simulation,
    )


def test_a_step_of_several_passes_commits_a_token_in_each() -> None:
    host = CountingHost([])
    context = DraftContext(
        anchors=torch.tensor([10, 50]), lens=torch.tensor([5, 7]), request_rows=torch.tensor([0, 1])
    )
    commit = undrafted_step(
        host,
        TORCH,
        context,
        passes=3,
        buffers=StepBuffers(max_requests=4, block_size=B, device="cpu"),
        config=config(),
    )
    assert commit.lens.tolist() == [3, 3]
    assert commit.token_ids.tolist() == [[11, 12, 13], [51, 52, 53]]
    assert commit.bonus.tolist() == [13, 53]
    assert commit.new_lens.tolist() == [8, 10]
    # the features of the anchor and of each token but the last are in the draft KV
    assert host.written == {5: 10.0, 6: 11.0, 7: 12.0, 71: 50.0, 72: 51.0, 73: 52.0}
    begins = ["begin [6, 8]", "begin [7, 9]"]
    one_pass = ["plan", "verify", "write"]
    assert host.events == [
        *one_pass, begins[0], *one_pass, begins[1], *one_pass, "publish [8, 10]", "record"
    ]  # fmt: skip
    assert host.marks == 4


def test_step_commits_the_correct_drafts_and_one_target_token() -> None:
    _, commit = run([2, 0])
    assert commit.lens.tolist() == [3, 1]
    assert commit.token_ids.tolist() == [[11, 12, 13, 0], [51, 0, 0, 0]]
    assert commit.bonus.tolist() == [13, 51]
    assert commit.new_lens.tolist() == [8, 8]


@pytest.mark.parametrize(
    ("num_rows", "lens"),
    [(2, [1, 1]), (3, [1, 2]), (4, [1, 3]), (5, [2, 3]), (8, [4, 3])],
)
def test_shared_rows_go_to_the_surest_drafts(num_rows: int, lens: list[int]) -> None:
    """Survival is .6 .3 .12 and .9 .72 .216: the second request's third draft is wrong."""
    host, commit = run([3, 2], num_rows=num_rows)
    assert commit.lens.tolist() == lens
    tokens = [
        [anchor + k for k in range(1, n + 1)] for anchor, n in zip((10, 50), lens, strict=True)
    ]
    assert commit.token_ids.tolist() == [row + [0] * (B - len(row)) for row in tokens]
    assert commit.bonus.tolist() == [row[-1] for row in tokens]
    assert commit.new_lens.tolist() == [5 + lens[0], 7 + lens[1]]
    # the committed rows' features, at their slots; planned only once the rows are known
    written = {slot: token for slot, token in host.written.items() if slot}
    expected = {5 + k: 10.0 + k for k in range(lens[0])}
    assert written == expected | {64 + 7 + k: 50.0 + k for k in range(lens[1])}
    assert "plan" not in host.events
    assert commit.bounds is not None and commit.bounds[-1] == num_rows


def test_a_rank_keeps_the_rows_and_the_tokens_that_the_first_rank_decided_on() -> None:
    """Its own would be two and four rows, and correct drafts in all of them."""
    bounds = torch.tensor([0, 3, 6])
    choices = torch.tensor([11, 77, 13, 51, 52, 88])
    host, commit = run([3, 3], num_rows=6, decided=[bounds, choices])
    assert host.decided == []
    assert commit.bounds is not None and commit.bounds.tolist() == [0, 3, 6]
    assert commit.lens.tolist() == [2, 3]
    assert commit.bonus.tolist() == [77, 88]


def test_lengths_are_published_before_the_draft_kv_is_written() -> None:
    """The next step is planned from the published lengths while the write still runs."""
    host, _ = run([3, 1])
    committed = ["advance [4, 2]", "publish [9, 9]", "write", "record"]
    assert host.events == ["plan", "draft", "verify", *committed]
    assert host.marks == 4, "a step is timed by four marks"


@pytest.mark.parametrize("width", range(1, B + 1))
def test_a_narrower_step_commits_as_far_as_it_looked(width: int) -> None:
    """Drafts beyond the width are not verified; the token after the kept ones is the target's."""
    host, commit = run([3, 1], width=width)
    kept = [min(3, width - 1), min(1, width - 1)]
    assert commit.lens.tolist() == [kept[0] + 1, kept[1] + 1]
    assert commit.token_ids.shape == (2, width)
    for row, (anchor, count) in enumerate(zip((10, 50), kept, strict=True)):
        assert commit.token_ids[row, : count + 1].tolist() == list(
            range(anchor + 1, anchor + count + 2)
        )
    assert commit.bonus.tolist() == [11 + kept[0], 51 + kept[1]]
    written = {slot for slot in host.written if slot != 0}
    assert written == {*range(5, 6 + kept[0]), *range(64 + 7, 64 + 8 + kept[1])}


def test_a_step_of_width_one_runs_no_drafter_but_writes_its_kv() -> None:
    """Otherwise later blocks would be drafted on a context with holes."""
    host, commit = run([3, 3], width=1)
    assert "draft" not in host.events and "write" in host.events
    assert commit.token_ids.tolist() == [[11], [51]]
    assert {slot: token for slot, token in host.written.items() if slot} == {5: 10.0, 71: 50.0}


def test_draft_kv_is_written_for_committed_rows_only() -> None:
    """Request 0 keeps anchor and two drafts at slots 5..7; request 1 only its anchor, at 64+7."""
    host, _ = run([2, 0])
    kept = {slot: token for slot, token in host.written.items() if slot != 0}
    assert kept == {5: 10.0, 6: 11.0, 7: 12.0, 71: 50.0}


def test_prefill_writes_every_prompt_token() -> None:
    host = CountingHost([])
    prefill_step(
        host,
        features=torch.tensor([[1.0], [2.0]]),
        positions=torch.tensor([0, 1]),
        slots=torch.tensor([40, 41]),
    )
    assert host.written == {40: 1.0, 41: 2.0}


def test_buffers_refuse_a_batch_larger_than_planned() -> None:
    buffers = StepBuffers(max_requests=2, block_size=B, device="cpu")
    try:
        buffers.verified.block(3, B)
    except AssertionError as error:
        assert "3 requests exceed the 2 planned" in str(error)
    else:
        raise AssertionError("a third request must not fit")


def test_rows_that_pad_a_graph_write_to_the_scratch_slot() -> None:
    """A wider step before may have left real slots there."""
    buffer = StepBuffers(max_requests=4, block_size=B, device="cpu").verified
    buffer.block(4, B).slots.fill_(9)
    rows = buffer.rows(2 * 3, 12)
    assert [len(each) for each in vars(rows).values()] == [12] * 3
    assert rows.slots.tolist() == [9] * 6 + [0] * 6


def test_simulated_acceptance_commits_its_length_whatever_the_target_says() -> None:
    _, commit = run([0, 3], SteadyAcceptance(2.0))
    assert commit.lens.tolist() == [2, 2]
    _, commit = run([0, 3], SteadyAcceptance(99.0))
    assert commit.lens.tolist() == [B, B]
    _, commit = run([0, 3], SteadyAcceptance(99.0), width=2)
    assert commit.lens.tolist() == [2, 2]
