"""Measure a pair: accept length, its histogram, and that drafting changes no token.

    python -m sglang_dflash.train.evaluate --target DIR --drafter DIR

Prompts come from the held-out split of the package's own grammar.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_dflash.reference.generate import (
    Choose,
    Generation,
    generate,
    generate_plain,
    greedy,
)
from sglang_dflash.reference.model import Drafter
from sglang_dflash.train.batches import encode_prompt
from sglang_dflash.train.data import draw_exchanges, sample_prompts


def accept_length(generations: Sequence[Generation]) -> float:
    """Return the mean tokens kept per verify step; tokens from prefill not counted."""
    steps = sum(len(g.blocks) for g in generations)
    return sum(len(g.token_ids) - 1 for g in generations) / max(steps, 1)


def histogram(generations: Sequence[Generation]) -> dict[int, int]:
    """Return how often a verify step committed each number of tokens, as verified."""
    return dict(sorted(Counter(n for g in generations for n in g.commit_lens).items()))


def sample_at(temperature: float, *, seed: int) -> Choose:
    """Return a rule that draws each token from its whole distribution; 0 is greedy."""
    if not temperature:
        return greedy

    def choose(logits: Tensor, before: Sequence[int]) -> int:
        generator = torch.Generator().manual_seed((seed << 32) + len(before))
        waited = torch.empty(logits.shape[0]).exponential_(generator=generator)
        return int((logits.float().cpu() / temperature - waited.log()).argmax())

    return choose


class Ideal:
    """The accept length of an ideal drafter: one whose every draft is the target's likeliest token.

    Wraps a rule of choice and notes where the choice was that token. Sampled text departs from it,
    and so bounds what training can reach.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._likeliest: dict[int, bool] = {}
        self._tokens = self._steps = 0

    def __call__(self, logits: Tensor, before: Sequence[int]) -> int:
        token = self._choose(logits, before)
        # a place behind a wrong draft is chosen again, with the right tokens before it
        self._likeliest[len(before)] = token == int(logits.argmax())
        return token

    def count(self, generation: Generation, *, prompt_len: int, block_size: int) -> None:
        """Walk one finished generation as that drafter would, and begin anew."""
        at, last = prompt_len, prompt_len + len(generation.token_ids) - 1
        while at < last:
            end = min(at + block_size, last)
            at = next((k for k in range(at + 1, end) if not self._likeliest[k]), end)
            self._steps += 1
        self._tokens += len(generation.token_ids) - 1
        self._likeliest = {}

    @property
    def accept_length(self) -> float:
        return self._tokens / max(self._steps, 1)


@dataclass(frozen=True)
class Evaluation:
    prompts: list[str]
    answers: list[str]
    generations: list[Generation]
    differing: list[str]  # prompts whose tokens are not those of plain greedy decoding

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
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int = 512,
) -> Evaluation:
    """Answer every prompt twice, with and without the drafter, and compare."""
    answers, generations, differing = [], [], []
    stop = {tokenizer.eos_token_id}
    for prompt in prompts:
        ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}])
        drafted = generate(target, drafter, ids, max_new_tokens=max_new_tokens, eos_token_ids=stop)
        plain = generate_plain(target, ids, max_new_tokens=max_new_tokens, eos_token_ids=stop)
        if drafted.token_ids != plain:
            differing.append(prompt)
        generations.append(drafted)
        answers.append(tokenizer.decode(drafted.token_ids, skip_special_tokens=True))
    return Evaluation(list(prompts), answers, generations, differing)


def grammar_answers(prompts: Sequence[str], *, seed: int) -> dict[str, str]:
    """Return what the grammar itself answers to prompts that `sample_prompts` drew with `seed`."""
    wanted, found = set(prompts), {}
    for exchange in draw_exchanges(seed=seed, split="held_out"):
        if exchange.prompt in wanted:
            found.setdefault(exchange.prompt, exchange.answer)
        if len(found) == len(wanted):
            return found
    raise AssertionError("draw_exchanges ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=5, help="how many answers to print")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    drafter = Drafter.from_pretrained(args.drafter)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = sample_prompts(args.prompts, seed=args.seed)
    result = evaluate(target, drafter, tokenizer=tokenizer, prompts=prompts)
    right = grammar_answers(prompts, seed=args.seed)
    for prompt, answer in list(zip(prompts, result.answers, strict=True))[: args.show]:
        print(f"> {prompt}\n{answer}\n")
    print(result.report())
    good = sum(right[p] == a for p, a in zip(prompts, result.answers, strict=True))
    print(f"answers word for word as the grammar gives them: {good}/{len(prompts)}")


if __name__ == "__main__":
    main()
