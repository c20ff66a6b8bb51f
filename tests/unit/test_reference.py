"""The oracle checked on its own: masks by eye, greedy equality, and the draft KV invariant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.reference.generate import (
    Block,
    capture_features,
    draft_block,
    generate,
    generate_plain,
    prefill,
    recompute_context,
    verify_block,
)
from sglang_dflash.reference.model import FULL, SLIDING, Drafter, block_mask
from sglang_dflash.reference.rejection import BlockRule
from sglang_dflash.reference.rope import Rope
from tests.oracle_drafter import make_drafter

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def make_target(kind: str):
    torch.manual_seed(0)
    if kind == "llama":
        target = LlamaForCausalLM(LlamaConfig(**SHAPE))
    elif kind == "qwen3":
        target = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    else:
        # untied: a scaled and tied embedding would make an untrained model repeat its input
        config = Gemma3TextConfig(
            **SHAPE,
            sliding_window=8,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            query_pre_attn_scalar=16,
            tie_word_embeddings=False,
        )
        target = Gemma3ForCausalLM(config)
    # with default initial weights greedy text settles on one token; wider ones keep it moving
    for parameter in target.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, 0.25)
    return target.eval().requires_grad_(False)


def seen(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if key else "." for key in row) for row in mask[0].tolist()]


def test_full_layer_sees_the_context_before_the_anchor_and_its_whole_block():
    """If this broke, the drafter would read features that do not exist yet at inference."""
    mask = block_mask(
        torch.tensor([[[3, 4, 5]]]), context_lens=torch.tensor([5]), context_size=5, window=None
    )
    assert seen(mask) == ["xxx.." + "xxx"] * 3


def test_sliding_layer_is_causal_in_the_block_and_counts_the_token_itself():
    """If this broke, served sliding layers (window_left = sliding_window - 1) would disagree."""
    mask = block_mask(
        torch.tensor([[[4, 5, 6]]]), context_lens=torch.tensor([4]), context_size=4, window=3
    )
    assert seen(mask) == [
        "..xx" + "x..",
        "...x" + "xx.",
        "...." + "xxx",
    ]


def test_blocks_of_one_sequence_do_not_see_each_other():
    """If this broke, training would leak later answers into earlier blocks."""
    mask = block_mask(
        torch.tensor([[[1, 2], [3, 4]]]),
        context_lens=torch.tensor([5]),
        context_size=5,
        window=None,
    )
    assert seen(mask) == ["x...." + "xx.."] * 2 + ["xxx.." + "..xx"] * 2


def test_padding_rows_of_the_context_are_never_seen():
    """If this broke, a short row of a batch would attend to its padding."""
    mask = block_mask(
        torch.tensor([[[4, 5]]]), context_lens=torch.tensor([2]), context_size=4, window=None
    )
    assert seen(mask) == ["xx.." + "xx"] * 2


@pytest.mark.parametrize("kind,reach", [(FULL, 0), (SLIDING, 5)])
def test_a_changed_last_slot_reaches_only_whom_the_layer_lets_it(kind: str, reach: int):
    """If this broke, the mask would be right on paper and unused in the layers."""
    drafter = make_drafter(layer_types=(kind, kind))
    torch.manual_seed(2)
    context = drafter.context_kv(torch.randn(1, 4, 32), torch.arange(4)[None])
    x = torch.randn(1, 6, 32)
    changed = x.clone()
    changed[:, -1] += 1
    positions = 4 + torch.arange(6)[None]
    one = drafter(x, positions, context=context)
    two = drafter(changed, positions, context=context)
    differs = (one != two).any(-1)[0].tolist()
    assert differs == [k >= reach for k in range(6)]


def test_context_outside_the_window_has_no_influence_on_sliding_layers():
    """If this broke, a windowed cache that drops old tokens would change the drafts."""
    drafter = make_drafter(layer_types=(SLIDING, SLIDING), sliding_window=4)
    torch.manual_seed(2)
    rows = torch.randn(1, 10, 32)
    other = rows.clone()
    # the anchor at position 10 sees positions 7, 8, 9 and itself
    other[:, :7] += 1
    x, positions, where = torch.randn(1, 3, 32), 10 + torch.arange(3)[None], torch.arange(10)[None]
    one = drafter(x, positions, context=drafter.context_kv(rows, where))
    two = drafter(x, positions, context=drafter.context_kv(other, where))
    assert torch.equal(one, two)
    other[:, 7] += 1
    three = drafter(x, positions, context=drafter.context_kv(other, where))
    assert not torch.equal(one[:, 0], three[:, 0])


def test_training_forward_at_an_anchor_equals_the_inference_block():
    """If this broke, the drafter would be trained on a different function from the one served."""
    drafter = make_drafter()
    torch.manual_seed(3)
    projected = torch.randn(2, 20, 32)
    steps = torch.arange(20).expand(2, -1)
    lens = torch.tensor([20, 15])
    anchors = torch.tensor([[4, 11, 17], [2, 9, 14]])
    embeddings = torch.randn(2, 3, 8, 32)
    together = drafter.forward_anchors(
        embeddings, anchors, context=drafter.context_kv(projected, steps), context_lens=lens
    )
    for row in range(2):
        for n, anchor in enumerate(anchors[row].tolist()):
            context = drafter.context_kv(projected[row : row + 1, :anchor], steps[:1, :anchor])
            alone = drafter(
                embeddings[row : row + 1, n], anchor + torch.arange(8)[None], context=context
            )
            # fp32; the summation order differs
            torch.testing.assert_close(together[row, n], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_features_are_the_outputs_of_the_named_layers(kind: str):
    """If this broke (an off-by-one), acceptance would collapse on released checkpoints."""
    target = make_target(kind)
    outputs = {}
    for i in (0, 2):
        target.model.layers[i].register_forward_hook(
            lambda _module, _args, out, i=i: outputs.update(
                {i: out[0] if isinstance(out, tuple) else out}
            )
        )
    features = capture_features(target, torch.tensor([[5, 6, 7]]), (0, 2))
    assert torch.equal(features, torch.cat((outputs[0], outputs[2]), dim=-1))


def test_last_layer_is_refused_as_a_feature():
    """If this broke, the drafter would be fed hidden states after the final norm."""
    with pytest.raises(ValueError, match=r"Cannot capture layers \[3\] of a target with 4 layers"):
        capture_features(make_target("llama"), torch.tensor([[5]]), (0, 3))


@pytest.mark.parametrize("block_size", [2, 5, 8])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_drafting_changes_no_token_of_an_untrained_pair(kind: str, block_size: int):
    """If this broke, DFlash would not be lossless."""
    target, drafter = make_target(kind), make_drafter()
    prompt = [5, 9, 33, 12, 50, 7, 7, 21]
    plain = generate_plain(target, prompt, max_new_tokens=40)
    drafted = generate(target, drafter, prompt, max_new_tokens=40, block_size=block_size)
    assert drafted.token_ids == plain
    assert len(set(plain)) > 3, plain


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_drafting_changes_no_token_of_a_seeded_draw(kind: str):
    """Noise fixed by position and a penalty on earlier tokens: each row must see its own past."""

    def choose(logits: torch.Tensor, before: Sequence[int]) -> int:
        noise = torch.rand(len(logits), generator=torch.Generator().manual_seed(len(before)))
        counts = torch.bincount(torch.tensor(before), minlength=len(logits))
        return int((logits - 0.5 * counts - (-noise.log()).log()).argmax())

    target, drafter = make_target(kind), make_drafter()
    prompt = [5, 9, 33, 12, 50, 7, 7, 21]
    plain = generate_plain(target, prompt, max_new_tokens=40, choose=choose)
    drafted = generate(target, drafter, prompt, max_new_tokens=40, block_size=5, choose=choose)
    assert drafted.token_ids == plain
    assert plain != generate_plain(target, prompt, max_new_tokens=40)


def test_a_block_rule_commits_its_drafts_and_a_token_of_its_own():
    """If this broke, a model card's figures for sampled drafts would describe other tokens."""
    target, drafter = make_target("llama"), make_drafter()
    prompt = [5, 9, 33, 12]
    rule = BlockRule(1.0, seed=0)
    found = generate(target, drafter, prompt, max_new_tokens=60, block_size=5, choose=rule)
    text = [*prompt, *found.token_ids]
    for block, length in zip(found.blocks[:-1], found.commit_lens[:-1], strict=True):
        kept = block.token_ids[:length]
        assert list(kept) == text[block.start : block.start + length]
    # untrained, and so uncertain that some drafts are accepted by chance
    assert sum(found.commit_lens) - len(found.commit_lens) > 0
    rule = BlockRule(1.0, seed=0)
    again = generate(target, drafter, prompt, max_new_tokens=60, block_size=5, choose=rule)
    assert again.token_ids == found.token_ids


def test_generation_stops_at_the_end_token_and_keeps_it():
    """If this broke, the two loops would disagree on where an answer ends."""
    target, drafter = make_target("llama"), make_drafter()
    prompt = [5, 9, 33]
    free = generate_plain(target, prompt, max_new_tokens=20)
    end = free[7]
    expected = free[: free.index(end) + 1]
    drafted = generate(target, drafter, prompt, max_new_tokens=20, eos_token_ids={end})
    assert drafted.token_ids == expected
    assert generate_plain(target, prompt, max_new_tokens=20, eos_token_ids={end}) == expected


def test_blocks_follow_each_other_by_what_was_committed():
    """If this broke, another implementation could not be compared block for block."""
    target, drafter = make_target("qwen3"), make_drafter()
    prompt = [5, 9, 33, 12]
    found = generate(target, drafter, prompt, max_new_tokens=30)
    start = len(prompt)
    whole = prompt + generate_plain(target, prompt, max_new_tokens=60)
    for block, commit_len in zip(found.blocks, found.commit_lens, strict=True):
        assert block.start == start
        assert len(block.token_ids) == 8
        assert block.token_ids[:commit_len] == tuple(whole[start : start + commit_len])
        start += commit_len


@pytest.mark.parametrize("correct", [0, 3, 7], ids=["none", "some", "all"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_wrong_drafts_commit_the_correct_prefix_and_the_bonus(kind: str, correct: int):
    """If this broke, acceptance would be off by one or the bonus would be a draft."""
    target, drafter = make_target(kind), make_drafter()
    prompt = [5, 9, 33, 12]
    future = generate_plain(target, prompt, max_new_tokens=20)
    state = prefill(target, drafter, prompt)
    drafts = future[1 : 1 + correct] + [(t + 1) % 64 for t in future[1 + correct : 8]]
    commit_len = verify_block(
        target, drafter, state, block=Block(state.start, (future[0], *drafts))
    )
    assert commit_len == correct + 1
    assert state.token_ids == prompt + future[: correct + 2]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_draft_kv_equals_kv_from_scratch_after_any_accept_pattern(kind: str):
    """If this broke, rejected tokens would stay in the draft KV and poison later blocks."""
    target, drafter = make_target(kind), make_drafter()
    prompt = [5, 9, 33, 12, 50]
    future = generate_plain(target, prompt, max_new_tokens=40)
    state = prefill(target, drafter, prompt)
    for correct in (0, 7, 2, 5, 0, 1):
        done = len(state.token_ids) - len(prompt)
        drafts = future[done : done + correct]
        drafts += [(t + 1) % 64 for t in future[done + correct : done + 7]]
        block = Block(state.start, (state.token_ids[-1], *drafts))
        assert verify_block(target, drafter, state, block=block) == correct + 1
        fresh = recompute_context(target, drafter, state.token_ids[: state.start])
        assert len(state.context) == state.start
        # fp32: the cached forward sums in a different order from the full one
        close = {"rtol": 1e-3, "atol": 1e-4}
        for one, two in zip(state.context.keys, fresh.keys, strict=True):
            torch.testing.assert_close(one, two, **close)
        for one, two in zip(state.context.values, fresh.values, strict=True):
            torch.testing.assert_close(one, two, **close)


def test_block_larger_than_trained_is_refused():
    """If this broke, slots the drafter never saw in training would be drafted."""
    with pytest.raises(ValueError, match="block_size 9 was asked for .* trained with 8"):
        generate(make_target("llama"), make_drafter(), [5], max_new_tokens=4, block_size=9)


@pytest.mark.parametrize(
    "prompt", ["Tell me a story about Mira the brave fox.", "Count from 3 to 12."]
)
def test_drafting_changes_no_token_of_the_embedded_pair(prompt: str):
    """If this broke, DFlash would not be lossless where most drafts are accepted."""
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).eval()
    drafter = Drafter.from_pretrained(tiny_drafter())
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    stop = {tokenizer.eos_token_id}
    drafted = generate(target, drafter, ids, max_new_tokens=100, eos_token_ids=stop)
    plain = generate_plain(target, ids, max_new_tokens=100, eos_token_ids=stop)
    assert drafted.token_ids == plain
    first = drafted.blocks[0]
    state = prefill(target, drafter, ids)
    assert draft_block(target, drafter, state, block_size=16) == first


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("factor", "context"), [(32.0, 4096), (8.0, 256), (2.0, 32768)])
def test_yarn_is_transformers_own(factor: float, context: int, truncate: bool) -> None:
    """gpt-oss's drafters have it. Another frequency would lower acceptance, silently."""
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": context,
        "truncate": truncate,
    }
    config = Qwen3Config(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=int(factor * context),
        rope_parameters={"rope_theta": 150000.0, **scaling},
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = Rope(150000.0, scaling)
    torch.testing.assert_close(rope.frequencies(32), frequencies, atol=0, rtol=1e-5)
    assert rope.amplitude == pytest.approx(amplitude)
