"""Evaluate a pair: accept length, its histogram, and that drafting changes no token.

    python -m sglang_dflash.pairs.evaluate_tiny --target DIR --drafter DIR

Prompts come from the held-out split of the tiny pair's corpus.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs.tiny_corpus.corpus import draw_exchanges, sample_prompts
from sglang_dflash.reference.generate import (
    Generation,
    check_layer_ids,
    generate,
    generate_plain,
)
from sglang_dflash.reference.model import Drafter
from sglang_dflash.testing.progress import Progress
from sglang_dflash.train.acceptance import accept_length, histogram
from sglang_dflash.train.batches import encode_prompt


@dataclass(frozen=True)
class Evaluation:
    prompts: list[str]
    answers: list[str]
    generations: list[Generation]
    differing: list[str]  # prompts whose answer differs from plain greedy decoding

    @property
    def accept_length(self) -> float:
        return accept_length(self.generations)

    def report(self) -> str:
        tokens = [len(g.token_ids) for g in self.generations]
        counts = histogram(self.generations)
        total = sum(counts.values())
        lines = [
            f"prompts {len(self.prompts)}, generated tokens {sum(tokens)} "
            f"(shortest {min(tokens)}, longest {max(tokens)})",
            f"equal to plain greedy decoding: {len(self.prompts) - len(self.differing)}"
            f"/{len(self.prompts)}",
            f"accept length {self.accept_length:.2f} over {total} verify steps",
            "tokens committed: share of steps",
        ]
        lines += [f"  {n:2d}: {count / total:6.1%}" for n, count in counts.items()]
        return "\n".join(lines)


def evaluate(
    target: PreTrainedModel,
    drafter: Drafter,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int = 512,
) -> Evaluation:
    """Answer every prompt twice, with and without the drafter, and compare."""
    answers, generations, differing = [], [], []
    stop = {tokenizer.eos_token_id}
    with Progress(len(prompts), "prompts", what="evaluate") as progress:
        for prompt in prompts:
            ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}])
            drafted = generate(
                target, drafter, ids, max_new_tokens=max_new_tokens, eos_token_ids=stop
            )
            plain = generate_plain(target, ids, max_new_tokens=max_new_tokens, eos_token_ids=stop)
            if drafted.token_ids != plain:
                differing.append(prompt)
            generations.append(drafted)
            answer = tokenizer.decode(drafted.token_ids, skip_special_tokens=True)
            assert isinstance(answer, str), type(answer)
            answers.append(answer)
            progress.step()
    return Evaluation(list(prompts), answers, generations, differing)


def template_answers(prompts: Sequence[str], *, seed: int) -> dict[str, str]:
    """Return the templates' answers to the prompts that `sample_prompts` drew with `seed`."""
    wanted = set(prompts)
    found: dict[str, str] = {}
    for exchange in draw_exchanges(seed=seed, split="held_out"):
        if exchange.prompt in wanted:
            found.setdefault(exchange.prompt, exchange.answer)
        if len(found) == len(wanted):
            return found
    raise AssertionError("draw_exchanges ended")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--drafter", type=Path, required=True, help="the drafter's folder")
    parser.add_argument(
        "--prompts", type=int, default=100, help="prompts to answer; default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the prompts; default: %(default)s"
    )
    parser.add_argument(
        "--show", type=int, default=5, help="answers to print; default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; default: %(default)s")
    args = parser.parse_args(arguments)
    for option in ("prompts", "threads"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} {getattr(args, option)}: pass at least 1")
    for option in ("target", "drafter"):
        folder = getattr(args, option)
        if not (folder / "config.json").is_file():
            parser.error(f"--{option} {folder}: no such model. Pass a folder with a config.json")
    return args


def load(target: Path, drafter: Path) -> tuple[PreTrainedModel, Drafter, PreTrainedTokenizerBase]:
    """Return the pair and the target's tokenizer; ValueError names the option that is wrong."""
    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ValueError(f"--target {target} cannot be loaded: {error}") from None
    if tokenizer.chat_template is None:
        raise ValueError(
            f"--target {target} has no chat template, so it cannot be asked: a drafter has none. "
            "Pass the target's folder."
        )
    try:
        drafts = Drafter.from_pretrained(drafter)
        check_layer_ids(model, drafts.config.target_layer_ids)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"--drafter {drafter} cannot be loaded: {error}") from None
    return model, drafts, tokenizer


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    try:
        target, drafter, tokenizer = load(args.target, args.drafter)
    except ValueError as error:
        sys.exit(f"evaluate_tiny: {error}")
    prompts = sample_prompts(args.prompts, seed=args.seed)
    result = evaluate(target, drafter, tokenizer=tokenizer, prompts=prompts)
    right = template_answers(prompts, seed=args.seed)
    for prompt, answer in list(zip(prompts, result.answers, strict=True))[: args.show]:
        print(f"> {prompt}\n{answer}\n")
    print(result.report())
    good = sum(right[p] == a for p, a in zip(prompts, result.answers, strict=True))
    print(f"answers that match the grammar word for word: {good}/{len(prompts)}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("evaluate_tiny", main))
