"""DFlash decoding of one sequence over any transformers causal LM: the end-to-end oracle.

Verification by exact match: the target chooses a token from the logits of every row, greedily or by
sampling, and drafts are accepted up to the first mismatch. Or by block verification (`BlockRule`):
rejection sampling of drafts that were sampled from the drafter, which accepts more of them.

Every drafted block is recorded, so another implementation can be compared block by block and not
only by its text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sglang_dflash.reference.model import ContextKV, Drafter
from sglang_dflash.reference.rejection import BlockRule

# (logits [V], the tokens before the chosen one) -> token
Choose = Callable[[Tensor, Sequence[int]], int]


def greedy(logits: Tensor, _before: Sequence[int]) -> int:
    return int(logits.argmax())


@dataclass(frozen=True)
class Block:
    start: int  # position of the anchor
    token_ids: tuple[int, ...]  # the anchor, then the drafts


@dataclass(frozen=True)
class Generation:
    token_ids: list[int]  # generated tokens, without the prompt, including an EOS token
    blocks: list[Block]  # one per verify step
    commit_lens: list[int]  # as verified; the last may exceed the tokens kept in token_ids

    @property
    def accept_length(self) -> float:
        """Tokens kept per verify step; prefill's token is not counted."""
        return (len(self.token_ids) - 1) / max(len(self.blocks), 1)


@dataclass
class Decoding:
    """One running sequence. `token_ids[:start]` have target KV and draft KV; the anchor at `start`
    is committed, but neither model has seen it yet."""

    token_ids: list[int]  # prompt and committed tokens
    cache: DynamicCache | Rerun
    context: ContextKV  # [1, start, ...]

    @property
    def start(self) -> int:
        return len(self.token_ids) - 1


def check_layer_ids(target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
    """Raise ValueError for layers whose output transformers returns only after the final norm."""
    count = target.config.get_text_config().num_hidden_layers
    bad = [i for i in layer_ids if not 0 <= i < count - 1]
    if bad:
        raise ValueError(
            f"Cannot capture layers {bad} of a target with {count} layers. Use ids 0..{count - 2}: "
            "the last layer's hidden state is only available after the final norm."
        )


def join_features(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Concatenate the outputs of the given layers, [b, T, K * H]."""
    # entry 0 is the embedding, so the output of layer i is entry i + 1
    return torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1)


@torch.no_grad()
def capture_features(
    target: PreTrainedModel,
    input_ids: Tensor,  # [b, T] int64
    layer_ids: Sequence[int],
) -> Tensor:
    """Return the features of every token from one forward pass without a cache, [b, T, K * H]."""
    check_layer_ids(target, layer_ids)
    out = target(
        input_ids=input_ids,
        output_hidden_states=True,
        use_cache=False,
        logits_to_keep=1,
    )
    return join_features(out.hidden_states, layer_ids)


@torch.no_grad()
def recompute_context(
    target: PreTrainedModel, drafter: Drafter, token_ids: Sequence[int]
) -> ContextKV:
    """Compute the draft KV of `token_ids` from scratch; incremental updates must equal it."""
    input_ids = torch.tensor([list(token_ids)], device=target.device)
    features = capture_features(target, input_ids, drafter.config.target_layer_ids)
    return _context_rows(drafter, features, first=0)


def _context_rows(drafter: Drafter, features: Tensor, *, first: int) -> ContextKV:
    positions = first + torch.arange(features.shape[1], device=features.device)[None]
    projected = drafter.project(features.to(drafter.fc.weight.dtype))
    return drafter.context_kv(projected, positions)


class Rerun:
    """In place of a cache, where a target's recurrent state cannot be cropped: the tokens so far,
    all of which run again with every step."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def crop(self, length: int) -> None:
        del self.token_ids[length:]


def _is_recurrent(target: PreTrainedModel) -> bool:
    kinds = getattr(target.config.get_text_config(), "layer_types", None)
    return "linear_attention" in (kinds or ())


class TargetOutput(NamedTuple):
    logits: Tensor  # [1, T, V]
    hidden_states: tuple[Tensor, ...]  # each [1, T, H]; the embedding, then every layer


def _forward(
    target: PreTrainedModel, token_ids: Sequence[int], cache: DynamicCache | Rerun
) -> TargetOutput:
    if isinstance(cache, Rerun):
        cache.token_ids += token_ids
        input_ids = torch.tensor([cache.token_ids], device=target.device)
        out = target(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        rows = slice(-len(token_ids), None)
        return TargetOutput(out.logits[:, rows], tuple(x[:, rows] for x in out.hidden_states))
    out = target(
        input_ids=torch.tensor([list(token_ids)], device=target.device),
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=True,
    )
    return TargetOutput(out.logits, out.hidden_states)


@torch.no_grad()
def prefill(
    target: PreTrainedModel, drafter: Drafter, input_ids: Sequence[int], choose: Choose = greedy
) -> Decoding:
    """Run the prompt and commit the first token."""
    check_layer_ids(target, drafter.config.target_layer_ids)
    # no config: every layer caches all tokens, so that rejected ones can be cropped
    cache = Rerun() if _is_recurrent(target) else DynamicCache()
    out = _forward(target, input_ids, cache)
    features = join_features(out.hidden_states, drafter.config.target_layer_ids)
    first_token = choose(out.logits[0, -1], input_ids)
    return Decoding([*input_ids, first_token], cache, _context_rows(drafter, features, first=0))


@torch.no_grad()
def draft_block(
    target: PreTrainedModel,
    drafter: Drafter,
    state: Decoding,
    *,
    block_size: int,
    choose: Choose | BlockRule = greedy,
) -> Block:
    """Draft block_size - 1 tokens after the anchor in one pass; `state` is not changed."""
    config = drafter.config
    anchor = state.token_ids[-1]
    ids = torch.tensor([[anchor] + [config.mask_token_id] * (block_size - 1)], device=target.device)
    positions = state.start + torch.arange(block_size, device=target.device)[None]
    embeddings = drafter.embed(target.get_input_embeddings(), ids).to(drafter.fc.weight.dtype)
    hidden = drafter(embeddings, positions, context=state.context)
    rows = drafter.drafted_rows(hidden[0])
    # a logit softcap would not change the argmax
    logits = drafter.logits(rows, target.get_output_embeddings())
    if isinstance(choose, BlockRule):
        choose.start_block()
    tokens = [anchor]
    for row, own in zip(rows, logits, strict=True):
        own = drafter.logits_after(tokens[-1], own, row)
        if isinstance(choose, BlockRule):
            tokens.append(choose.draft_next(own))
        else:
            tokens.append(choose(own, [*state.token_ids, *tokens[1:]]))
    return Block(state.start, tuple(tokens))


@torch.no_grad()
def verify_block(
    target: PreTrainedModel,
    drafter: Drafter,
    state: Decoding,
    *,
    block: Block,
    choose: Choose | BlockRule = greedy,
) -> int:
    """Verify a block, commit its correct drafts and the bonus, and return the commit length.

    Writes the target KV and the draft KV of the anchor and the correct drafts, and nothing else.
    """
    assert (block.start, block.token_ids[0]) == (state.start, state.token_ids[-1]), block
    out = _forward(target, block.token_ids, state.cache)
    drafts = block.token_ids[1:]
    if isinstance(choose, BlockRule):
        committed = choose.commit(out.logits[0], drafts)
    else:
        choices = [
            choose(logits, [*state.token_ids, *drafts[:row]])
            for row, logits in enumerate(out.logits[0])
        ]
        num_correct = 0
        while num_correct < len(drafts) and drafts[num_correct] == choices[num_correct]:
            num_correct += 1
        committed = choices[: num_correct + 1]
    commit_len = len(committed)
    state.cache.crop(block.start + commit_len)
    features = join_features(out.hidden_states, drafter.config.target_layer_ids)
    rows = _context_rows(drafter, features[:, :commit_len], first=block.start)
    state.context = state.context.extend(rows)
    state.token_ids += committed
    return commit_len


def generate(
    target: PreTrainedModel,
    drafter: Drafter,
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    block_size: int | None = None,
    choose: Choose | BlockRule = greedy,
) -> Generation:
    """Decode with DFlash: the same tokens as `generate_plain` in fewer target passes or, with a
    `BlockRule`, samples from the same distribution.

    `block_size` None means the one the drafter was trained with.
    """
    block_size = _check_block_size(drafter, block_size)
    prompt_len = len(input_ids)
    first: Choose
    drafts: Choose | BlockRule
    if isinstance(choose, BlockRule):
        first, drafts = choose.choose, choose
    else:
        first, drafts = choose, greedy
    state = prefill(target, drafter, input_ids, first)
    blocks, commit_lens = [], []
    kept = _keep(state.token_ids[prompt_len:], max_new_tokens, eos_token_ids)
    while kept is None:
        block = draft_block(target, drafter, state, block_size=block_size, choose=drafts)
        blocks.append(block)
        commit_lens.append(verify_block(target, drafter, state, block=block, choose=choose))
        kept = _keep(state.token_ids[prompt_len:], max_new_tokens, eos_token_ids)
    return Generation(kept, blocks, commit_lens)


def _check_block_size(drafter: Drafter, block_size: int | None) -> int:
    trained = drafter.config.block_size
    if block_size is None:
        return trained
    if not 2 <= block_size <= trained:
        raise ValueError(
            f"block_size {block_size} was asked for but this drafter was trained with {trained}. "
            f"Pass 2 to {trained}."
        )
    return block_size


def _keep(
    generated: list[int], max_new_tokens: int, eos_token_ids: Collection[int]
) -> list[int] | None:
    """Return the final tokens of a finished sequence, None for an unfinished one."""
    ends = [i for i, token in enumerate(generated) if token in eos_token_ids]
    if ends and ends[0] < max_new_tokens:
        return generated[: ends[0] + 1]
    return generated[:max_new_tokens] if len(generated) >= max_new_tokens else None


@torch.no_grad()
def generate_plain(
    target: PreTrainedModel,
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    choose: Choose = greedy,
) -> list[int]:
    """Decode autoregressively, without a drafter."""
    cache = DynamicCache(config=target.config) if _is_recurrent(target) else DynamicCache()
    generated: list[int] = []
    step = list(input_ids)
    while len(generated) < max_new_tokens:
        out = target(
            input_ids=torch.tensor([step], device=target.device),
            past_key_values=cache,
            use_cache=True,
        )
        generated.append(choose(out.logits[0, -1], [*input_ids, *generated]))
        if generated[-1] in eos_token_ids:
            break
        step = generated[-1:]
    return generated
