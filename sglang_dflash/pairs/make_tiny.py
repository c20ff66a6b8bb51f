"""Make the tiny pair from scratch: corpus, tokenizer, target, drafter.

    python -m sglang_dflash.pairs.make_tiny --out DIR

Writes DIR/target and DIR/drafter. About twelve minutes on two CPU cores.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs.evaluate_tiny import evaluate
from sglang_dflash.pairs.save import export_drafter, export_target, round_to_bfloat16
from sglang_dflash.pairs.tiny_corpus.corpus import (
    Conversation,
    make_conversations,
    sample_prompts,
)
from sglang_dflash.pairs.tiny_corpus.tokenizer import VOCAB_SIZE, make_tokenizer
from sglang_dflash.reference.model import FULL, SLIDING, Drafter, DrafterConfig
from sglang_dflash.train.batches import Batch, Batches, encode_chat
from sglang_dflash.train.loss import DrafterLoss
from sglang_dflash.train.trainer import Schedule, optimise


@dataclass(frozen=True, kw_only=True)
class Recipe:
    seed: int = 0
    conversations: int = 20000  # about one epoch of the target
    target_schedule: Schedule = Schedule(steps=2800, learning_rate=3e-3)
    target_tokens: int = 1024  # per step, padding included
    # the drafter is trained for one epoch on corpus chats that the target has not seen. The text of
    # the target resembles the corpus, and these chats are free; generating its own answers to a few
    # hundred prompts took a third of the time, and the drafter overfitted them
    fresh_chats: int = 12000
    drafter_schedule: Schedule = Schedule(steps=3000, learning_rate=2e-3)
    # in the same time, many small batches reach a lower loss than few large ones
    drafter_tokens: int = 512
    drafter_rows: int = 4
    blocks: int = 64  # per step: 16 anchors in each of four short chats, 64 in one long chat


def target_config(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        # about 1 / sqrt(hidden): with the usual 0.02 the loss stays on a plateau for most steps
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def drafter_config(tokenizer: PreTrainedTokenizerBase) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        block_size=16,
        num_target_layers=8,
        mask_token_id=tokenizer.mask_token_id,
        target_layer_ids=(1, 3, 5, 6),
        # one layer of each type, so that serving this pair covers both
        layer_types=(SLIDING, FULL),
        sliding_window=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def target_loss(target: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the next-token cross entropy over the answers."""
    hidden = target.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    said = batch.answer_mask[:, 1:]
    logits = target.get_output_embeddings()(hidden[:, :-1][said])
    return F.cross_entropy(logits.float(), batch.token_ids[:, 1:][said])


def train_target(
    recipe: Recipe, conversations: list[Conversation], *, tokenizer: PreTrainedTokenizerBase
) -> LlamaForCausalLM:
    """Return a trained target whose weights are already rounded to bfloat16."""
    torch.manual_seed(recipe.seed)
    target = LlamaForCausalLM(target_config(tokenizer))
    examples = [encode_chat(tokenizer, c.messages()) for c in conversations]
    batches = Batches(
        examples,
        tokens_per_batch=recipe.target_tokens,
        pad_id=tokenizer.pad_token_id,
        seed=recipe.seed,
    )
    optimise(
        target,
        batches,
        loss_of=lambda batch: target_loss(target, batch),
        schedule=recipe.target_schedule,
        label="target",
    )
    round_to_bfloat16(target)
    return target.eval().requires_grad_(False)


def train_drafter(
    recipe: Recipe,
    conversations: list[Conversation],
    *,
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
) -> Drafter:
    """Return a trained drafter whose weights are already rounded to bfloat16."""
    torch.manual_seed(recipe.seed + 2)
    drafter = Drafter(drafter_config(tokenizer))
    batches = Batches(
        [encode_chat(tokenizer, c.messages()) for c in conversations],
        tokens_per_batch=recipe.drafter_tokens,
        rows_per_batch=recipe.drafter_rows,
        pad_id=tokenizer.pad_token_id,
        seed=recipe.seed + 2,
    )
    loss_of = DrafterLoss(
        target=target,
        drafter=drafter,
        generator=torch.Generator().manual_seed(recipe.seed + 2),
        blocks=recipe.blocks,
    )
    optimise(drafter, batches, loss_of=loss_of, schedule=recipe.drafter_schedule, label="drafter")
    round_to_bfloat16(drafter)
    return drafter.eval().requires_grad_(False)


def make_pair(recipe: Recipe, out: Path) -> None:
    """Run the whole recipe and write both folders."""
    began = time.monotonic()
    conversations = make_conversations(recipe.conversations, seed=recipe.seed)
    texts = [m["content"] for c in conversations for m in c.messages()]
    tokenizer = make_tokenizer(out / "target", texts=texts)
    target = train_target(recipe, conversations, tokenizer=tokenizer)
    export_target(
        target,
        out / "target",
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )
    print(f"target written after {time.monotonic() - began:.0f} s", flush=True)
    fresh = make_conversations(recipe.fresh_chats, seed=recipe.seed + 5)
    drafter = train_drafter(recipe, fresh, target=target, tokenizer=tokenizer)
    export_drafter(drafter, out / "drafter")
    print(f"drafter written after {time.monotonic() - began:.0f} s", flush=True)
    prompts = sample_prompts(20, seed=recipe.seed)
    print(evaluate(target, drafter, tokenizer=tokenizer, prompts=prompts).report(), flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and drafter/")
    parser.add_argument(
        "--seed",
        type=int,
        default=Recipe.seed,
        help="of the text and of both trainings; default: %(default)s",
    )
    parser.add_argument(
        "--target-steps",
        type=int,
        default=Recipe.target_schedule.steps,
        help="training steps of the target; default: %(default)s",
    )
    parser.add_argument(
        "--drafter-steps",
        type=int,
        default=Recipe.drafter_schedule.steps,
        help="training steps of the drafter; default: %(default)s",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(
        seed=args.seed,
        target_schedule=replace(Recipe.target_schedule, steps=args.target_steps),
        drafter_schedule=replace(Recipe.drafter_schedule, steps=args.drafter_steps),
    )
    make_pair(recipe, args.out)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("make_tiny", main))
