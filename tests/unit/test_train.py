"""Small-scale training: losses, labels, blocks, batches and what a few steps learn."""

from __future__ import annotations

import math
from array import array
from itertools import repeat

import pytest
import torch
from scipy.stats import chisquare
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_dflash.pairs.make_tiny import target_loss
from sglang_dflash.pairs.tiny_corpus.corpus import make_conversations
from sglang_dflash.reference.generate import Generation, capture_features
from sglang_dflash.reference.model import FULL, SLIDING, Drafter, DrafterConfig
from sglang_dflash.train.acceptance import Ideal, sample_at
from sglang_dflash.train.anchors import Anchors, make_labels, sample_anchors
from sglang_dflash.train.answers import Answer
from sglang_dflash.train.batches import Batches, collate, encode_chat, encode_prompt
from sglang_dflash.train.blocks import run_blocks, run_target
from sglang_dflash.train.loss import (
    DrafterLoss,
    decay_weights,
    dpace_weights,
    row_losses,
    weighted_mean,
)
from sglang_dflash.train.repeats import useful_length
from sglang_dflash.train.trainer import Schedule, optimise


@pytest.fixture(scope="module")
def examples(tokenizer):
    return [encode_chat(tokenizer, c.messages()) for c in make_conversations(40, seed=5)]


def make_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        # wide, so that the frozen tied head can express a preference before any training
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def make_drafter() -> Drafter:
    torch.manual_seed(1)
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=1024,
        block_size=8,
        num_target_layers=3,
        mask_token_id=3,
        target_layer_ids=(0, 1),
        layer_types=(SLIDING, FULL),
        sliding_window=16,
    )
    return Drafter(config)


def test_decay_weights_fall_by_e_over_gamma_slots():
    """If this broke, the far slots would drown the near ones, which decide acceptance."""
    exist = torch.tensor([[[True, True, True, False]]])
    weights = decay_weights(2.0)(torch.zeros(1, 1, 4), exist)
    expected = [1.0, math.exp(-0.5), math.exp(-1.0), 0.0]
    torch.testing.assert_close(weights, torch.tensor([[expected]]))


def test_dpace_weights_are_the_expected_slots_still_to_come():
    """If this broke, D-PACE would put weight on slots that are never reached."""
    # probabilities 1/2, 1/4 and 1 of the labels; the last slot does not exist
    losses = torch.tensor([[[math.log(2.0), math.log(4.0), 0.0, 9.0]]])
    exist = torch.tensor([[[True, True, True, False]]])
    # survival .75, .625, 1 -> products .75, .46875, .46875 -> sums from the end
    expected = [1.6875, 0.9375, 0.46875, 0.0]
    torch.testing.assert_close(dpace_weights()(losses, exist), torch.tensor([[expected]]))


def test_loss_is_the_weighted_mean():
    """If this broke, losses of batches with different answer lengths could not be compared."""
    loss = weighted_mean(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]))
    assert loss.item() == pytest.approx(5 / 4)
    assert weighted_mean(torch.zeros(0), torch.zeros(0)).item() == 0


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("soft", [False, True])
def test_losses_by_hand_are_those_of_torch(soft: bool, cap: float):
    """If this broke, the memory-bounded loss would be wrong: its gradient is not torch's own."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50).requires_grad_(False)
    labels = torch.randint(50, (23,))
    whole = (3 * torch.randn(23, 8)).requires_grad_(True)
    chunked = whole.detach().clone().requires_grad_(True)
    teacher, weights = torch.randn(23, 8), torch.rand(23)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(head(hidden) / cap) if cap else head(hidden)

    nll = F.cross_entropy(logits(whole), labels, reduction="none")
    predicted = logits(teacher).softmax(-1)
    expected = F.cross_entropy(logits(whole), predicted, reduction="none") if soft else nll
    found = row_losses(
        chunked, labels, teacher=teacher if soft else None, head=head, logit_cap=cap, chunk=5
    )
    torch.testing.assert_close(found.losses, expected)
    torch.testing.assert_close(found.nll, nll)
    assert not found.nll.requires_grad
    (expected * weights).sum().backward()
    (found.losses * weights).sum().backward()
    torch.testing.assert_close(chunked.grad, whole.grad)


def test_soft_labels_are_what_the_target_predicts_for_each_slot(examples):
    """If this broke, a drafter would learn the prediction for a different position."""
    target, drafter = make_target().eval().requires_grad_(False), make_drafter()
    batch = collate(examples[:3], pad_id=0)

    def loss(soft: bool) -> DrafterLoss:
        generator = torch.Generator().manual_seed(0)
        return DrafterLoss(target=target, drafter=drafter, generator=generator, soft=soft)

    anchors, labels = loss(soft=True).draw(batch)
    features = loss(soft=True).run_target(batch).features
    hidden = loss(soft=True).hidden(batch, anchors, features)
    log_odds = target.get_output_embeddings()(hidden).log_softmax(-1)
    predicted = target(batch.token_ids).logits.softmax(-1)
    total = weight = 0.0
    for b, n, k in labels.exist.nonzero().tolist():
        place = int(anchors.positions[b, n]) + 1 + k
        assert batch.token_ids[b, place] == labels.token_ids[b, n, k]
        each = math.exp(-k / 7)
        total += each * float(-(predicted[b, place - 1] * log_odds[b, n, k]).sum())
        weight += each
    assert loss(soft=True)(batch).item() == pytest.approx(total / weight, rel=1e-5)
    assert loss(soft=False)(batch).item() != pytest.approx(total / weight, rel=1e-2)


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_blocks_in_training_are_those_of_the_oracle(examples, attention):
    """If this broke, the drafter would be trained on a different computation than is served."""
    target, drafter = make_target().eval(), make_drafter().requires_grad_(False)
    batch = collate(examples[:3], pad_id=0, multiple=16)
    assert batch.token_ids.shape[1] % 16 == 0
    anchors = sample_anchors(batch.answer_mask, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = capture_features(target, batch.token_ids, (0, 1))
        found = run_blocks(
            target, drafter, batch, anchors.positions, features=features, attention=attention
        )
        places = torch.arange(features.shape[1]).expand_as(batch.token_ids)
        ids = torch.full((*anchors.positions.shape, 8), 3)
        ids[:, :, 0] = batch.token_ids.gather(1, anchors.positions)
        expected = drafter.forward_anchors(
            target.get_input_embeddings()(ids),
            anchors.positions,
            context=drafter.context_kv(drafter.project(features), places),
            context_lens=batch.lens,
        )
    torch.testing.assert_close(found, expected[:, :, 1:])


def test_features_are_the_outputs_of_the_named_layers_in_order():
    """If this broke, a server would feed the drafter other features than it was trained on."""
    target = make_target().eval()
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(
        run_target(target, ids, (1, 0)).features, capture_features(target, ids, (1, 0))
    )


def test_anchors_lie_in_answers_and_have_a_next_token():
    """If this broke, blocks would be trained where a server never drafts."""
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1]]).bool()
    anchors = sample_anchors(mask, 9, generator=torch.Generator().manual_seed(0))
    rows = [sorted(p[e].tolist()) for p, e in zip(anchors.positions, anchors.exist, strict=True)]
    assert rows == [[1, 2], [5]]


def test_a_block_ends_where_its_answer_ends():
    """If this broke, the drafter would learn to predict the user's next question."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    #                    user  ---answer---  user  answer
    mask = torch.tensor([[0, 1, 1, 1, 0, 1]]).bool()
    anchors = Anchors(torch.tensor([[1, 2]]), torch.tensor([[True, False]]))
    labels = make_labels(ids, mask, anchors, block_size=6)
    assert labels.token_ids[0, 0].tolist() == [12, 13, 14, 15, 15]
    # the second anchor does not exist
    assert labels.exist[0].long().tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_schedule_warms_up_and_ends_at_its_floor():
    """If this broke, the last steps would not settle."""
    schedule = Schedule(steps=100, learning_rate=1.0, warmup=0.1, floor=0.05)
    assert schedule.rate(0.01) == pytest.approx(0.1)
    assert schedule.rate(0.1) == pytest.approx(1.0)
    assert schedule.rate(1.0) == pytest.approx(0.05)


def test_schedule_follows_whichever_end_is_nearer():
    """If this broke, a run that ends by its time limit would stop at a high learning rate."""
    schedule = Schedule(steps=100, seconds=10.0)
    assert schedule.share(30, 1.0) == pytest.approx(0.3)
    assert schedule.share(30, 6.0) == pytest.approx(0.6)
    assert schedule.share(30, 99.0) == 1.0
    assert Schedule(seconds=10.0).share(10**6, 5.0) == pytest.approx(0.5)


def test_marked_answers_are_what_the_assistant_said(tokenizer):
    """If this broke, prompt tokens would be trained on, or end tokens would not."""
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, you."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Come back soon."},
    ]
    example = encode_chat(tokenizer, messages)
    pairs = list(zip(example.token_ids, example.answer_mask, strict=True))
    said = tokenizer.decode([t for t, marked in pairs if marked])
    assert said == "Hello, you.<|im_end|>Come back soon.<|im_end|>"
    whole = encode_prompt(tokenizer, messages[:4])
    assert list(example.token_ids[: len(whole)]) == whole


def test_batches_pad_on_the_right_within_their_budget(examples):
    """If this broke, causal attention would see padding, or memory would overflow."""
    batches = Batches(examples, tokens_per_batch=1024, pad_id=0, seed=0)
    for _ in range(8):
        batch = next(batches)
        assert batch.token_ids.numel() <= 1024 or batch.token_ids.shape[0] == 1
        for ids, length in zip(batch.token_ids.tolist(), batch.lens.tolist(), strict=True):
            assert 0 not in ids[:length]
            assert set(ids[length:]) <= {0}


def test_padding_does_not_change_the_drafter_loss(examples):
    """If this broke, the loss of a sequence would depend on its neighbours in the batch."""
    target, drafter = make_target().requires_grad_(False), make_drafter()
    short, long = sorted(examples, key=lambda e: len(e.token_ids))[:: len(examples) - 1]
    every = len(long.token_ids)

    def loss(group):
        generator = torch.Generator().manual_seed(0)
        blocks = every * len(group)
        loss_of = DrafterLoss(target=target, drafter=drafter, generator=generator, blocks=blocks)
        return loss_of(collate(group, pad_id=0)).item()

    # every anchor is used, so the batch loss is the mean over its rows, weighted by their slots
    generator = torch.Generator().manual_seed(0)
    parts = [loss([short]), loss([long])]
    sizes = []
    for example in (short, long):
        batch = collate([example], pad_id=0)
        anchors = sample_anchors(batch.answer_mask, every, generator=generator)
        labels = make_labels(batch.token_ids, batch.answer_mask, anchors, block_size=8)
        sizes.append(decay_weights(7.0)(labels.exist.float(), labels.exist).sum().item())
    mean = (parts[0] * sizes[0] + parts[1] * sizes[1]) / sum(sizes)
    assert loss([short, long]) == pytest.approx(mean, rel=1e-4)


def test_a_few_steps_lower_the_target_loss(examples):
    """If this broke, the target would not learn."""
    target = make_target()
    losses = optimise(
        target,
        Batches(examples, tokens_per_batch=1024, pad_id=0, seed=0),
        loss_of=lambda batch: target_loss(target, batch),
        schedule=Schedule(steps=25, learning_rate=5e-3),
        label="target",
    )
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_few_steps_lower_the_drafter_loss_and_leave_the_target_alone(examples, optimizer):
    """If this broke, the drafter would not learn, or the pair would drift apart."""
    target, drafter = make_target().requires_grad_(False), make_drafter()
    before = {k: v.clone() for k, v in target.state_dict().items()}
    losses = optimise(
        drafter,
        repeat(collate(examples[:4], pad_id=0)),
        loss_of=DrafterLoss(
            target=target, drafter=drafter, generator=torch.Generator().manual_seed(0)
        ),
        schedule=Schedule(steps=40, learning_rate=5e-3),
        label="drafter",
        optimizer=optimizer,
    )
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


def test_each_place_has_its_own_draw_from_the_whole_distribution():
    """If this broke, a model card would report a drafter's acceptance at another temperature."""
    odds = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    rule = sample_at(2.0, seed=1)
    found = torch.tensor([rule(2 * odds.log(), range(place)) for place in range(2000)])
    assert chisquare(found.bincount(minlength=3), 2000 * odds).pvalue > 1e-3
    assert [rule(2 * odds.log(), range(place)) for place in range(50)] == found[:50].tolist()
    assert sample_at(0.0, seed=1)(odds, ()) == 0


def test_an_ideal_drafter_stops_where_the_text_is_not_the_likeliest():
    """If this broke, a model card would overstate what a drafter can reach, or excuse a bad one."""
    logits = torch.tensor([0.0, 1.0])
    # the token at each position; 1 is always the argmax
    text = [0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    ideal = Ideal(lambda _logits, before: text[len(before)])
    for _ in range(2):
        for place in range(2, len(text)):
            # first as if the previous draft had been a different one, then as it was
            ideal(1 - logits, text[:place])
            ideal(logits, text[:place])
        # anchors at 2, 4 (first mismatch), 8 (a whole block of 4) and the end
        generation = Generation(text[2:], blocks=[], commit_lens=[])
        ideal.count(generation, prompt_len=2, block_size=4)
        assert ideal.accept_length == 8 / 3


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("abcdefgh", "abcdefgh"),
        ("abxyxyxy", "abxyxyxy"),
        ("abxyxyxyxyx", "abxyxyxy"),
        ("abxxxxxxxxx", "abxxx"),
        ("xxxxxxxxxab", "xxxxxxxxxab"),
        ("", ""),
    ],
)
def test_a_loop_at_the_end_of_an_answer_is_cut_after_three_rounds(text: str, kept: str):
    """If this broke, most of the training would go into text that any drafter can copy."""
    ids = [ord(letter) for letter in text]
    assert text[: useful_length(ids)] == kept
    prompt = array("i", ids * 2)
    for finish, answer in (("length", kept), ("stop", text)):
        example = Answer("key", 0.0, finish, prompt, array("i", ids)).example(64)
        assert "".join(map(chr, example.token_ids)) == text * 2 + answer
        assert sum(example.answer_mask) == len(answer)
