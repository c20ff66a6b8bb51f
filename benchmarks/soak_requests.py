"""The requests of a storm and how answers are judged; benchmarks/soak_storm.py sends them.

Two tokens can be so close that the rounding of a differently shaped batch decides between them,
with and without speculation. A differing answer counts as such a tie, and is reported, only if the
two tokens at the first difference are equal to within TIE in fp64; anything else is wrong.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.glue.cpu.sampling import _murmur_hash32
from sglang_dflash.pairs import tiny_target
from sglang_dflash.pairs.tiny_corpus.corpus import sample_prompts
from sglang_dflash.pairs.tiny_corpus.tokenizer import VOCAB_SIZE as VOCAB
from sglang_dflash.train.batches import encode_prompt

SEEDED = {"temperature": 1.4}
COMPARED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    # always filtered: SGLang samples an unfiltered request with different noise if its batch has a
    # filtered one, so a seed's text would depend on the neighbours, with and without DFLASH
    "seeded, top_k": SEEDED | {"top_k": 40},
    "seeded, top_k and top_p": SEEDED | {"top_k": 12, "top_p": 0.9},
    # one penalty: without overlap, SGLang applies several in a varying order
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.6},
    "grammar": {"temperature": 0.0, "regex": "([a-z]{2,7} ){3,30}[a-z]+"},
}
# not reproducible, so only their ends are checked
UNSEEDED: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0},
    "sampled, top_k and top_p": {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
}
KINDS = COMPARED | UNSEEDED
EOS = 2
REQUEST_TIMEOUT_S = 180
# between log-probabilities: about ten times the fp32 error of the embedded target's logits
TIE = 1e-5
# in a tensor's standard deviations: changes most answers, yet the drafter still fits
WEIGHT_NOISE = 0.02


@dataclass(frozen=True)
class Ask:
    """One request of the storm."""

    kind: str
    body: dict[str, Any]
    stream: bool
    abort_after: int | None  # chunks; None to read to the end

    @property
    def is_compared(self) -> bool:
        return self.kind in COMPARED


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    finish: dict[str, Any] | None  # None before the end
    cached: int  # prompt tokens found in the prefix cache


def choose_kinds(*, seeds: bool) -> list[str]:
    """Return the kinds of request; with seeds, all answers can be compared with plain decoding."""
    if seeds:
        return list(COMPARED)
    return [name for name, kind in COMPARED.items() if not kind["temperature"]] + list(UNSEEDED)


def encode_questions() -> list[list[int]]:
    """Return questions that the embedded pair can answer, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    return [
        encode_prompt(tokenizer, [{"role": "user", "content": text}])
        for text in sample_prompts(60, seed=3)
    ]


def draw(chance: random.Random, kinds: list[str], questions: list[list[int]]) -> Ask:
    """Draw a request: a question, which is drafted well, or random tokens, half of the time with
    a shared prefix."""
    kind = chance.choice(kinds)
    length = chance.choice([1, 2, 7, 30, 63, 64, 65, 120, 250, 250, 700, 1800])
    if chance.random() < 0.5:
        prompt = chance.choice(questions)
    elif chance.random() < 0.5:
        shared = random.Random(chance.randrange(4))
        prompt = [shared.randrange(5, VOCAB) for _ in range(length)]
        prompt += [chance.randrange(5, VOCAB) for _ in range(chance.randrange(1, 9))]
    else:
        prompt = [chance.randrange(5, VOCAB) for _ in range(length)]
    params = {
        **KINDS[kind],
        "max_new_tokens": chance.choice([1, 2, 15, 16, 17, 40, 90, 200]),
        # past the end of a grammar, SGLang without speculation would emit one stray token
        "ignore_eos": kind != "grammar" and chance.random() < 0.5,
    }
    if kind in COMPARED and params["temperature"] > 0:
        params["sampling_seed"] = chance.randrange(1 << 40)
    stream = chance.random() < 0.5
    abort = stream and chance.random() < 0.4
    return Ask(
        kind=kind,
        body={"input_ids": prompt, "sampling_params": params},
        stream=stream,
        abort_after=chance.randrange(1, 8) if abort else None,
    )


def answer(url: str, ask: Ask, *, whole: bool) -> Answer:
    """Send a request and return its answer; `whole` neither streams nor aborts."""
    body = {**ask.body, "stream": ask.stream and not whole}
    response = requests.post(
        f"{url}/generate", json=body, stream=body["stream"], timeout=REQUEST_TIMEOUT_S
    )
    response.raise_for_status()
    if not body["stream"]:
        return _read(response.json())
    found = Answer([], None, 0)
    with response:
        chunks = 0
        for line in response.iter_lines():
            if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                continue
            # each chunk holds the answer so far
            found = _read(json.loads(line[5:]))
            chunks += 1
            if chunks == ask.abort_after:
                break
    return found


def _read(reply: dict[str, Any]) -> Answer:
    if "output_ids" not in reply:
        raise ValueError(f"no output_ids in {json.dumps(reply)[:300]}")
    about = reply["meta_info"]
    return Answer(reply["output_ids"], about["finish_reason"], about["cached_tokens"])


def flaw(ask: Ask, found: Answer) -> str | None:
    """Return what is wrong with an answer that has no reference; None if nothing."""
    params, tokens = ask.body["sampling_params"], found.tokens
    if outside := [token for token in tokens if not 0 <= token < VOCAB]:
        return f"tokens outside the vocabulary: {outside}"
    if len(tokens) > params["max_new_tokens"]:
        return f"{len(tokens)} tokens, asked for {params['max_new_tokens']}"
    if not params["ignore_eos"] and EOS in tokens[:-1]:
        return f"continued after EOS: {tokens}"
    if found.finish is None:
        return None if ask.abort_after is not None else f"has no finish reason: {tokens}"
    ended = found.finish["type"]
    if ended == "length" and len(tokens) == params["max_new_tokens"]:
        return None
    if ended == "stop" and not params["ignore_eos"] and tokens[-1:] == [EOS]:
        return None
    return f"ended with {found.finish} after {len(tokens)} tokens, asked for {params}"


def gap_at_first_difference(
    ask: dict[str, Any], want: list[int], got: list[int], *, weights: Path
) -> float:
    """Return the fp64 gap between the first two differing tokens, under the weights in use at the
    time; infinite if one answer is a prefix of the other."""
    k = next((k for k, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
    if k is None:
        return math.inf
    prompt, params = ask["body"]["input_ids"], ask["body"]["sampling_params"]
    target = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64)
    with torch.no_grad():
        logits = target(torch.tensor([prompt + want[:k]])).logits[0, -1]
    penalty = params.get("frequency_penalty", 0.0)
    for token in set(want[:k]):
        logits[token] -= penalty * want[:k].count(token)
    one, two = want[k], got[k]
    gap = abs(logits[one] - logits[two]).item()
    if "sampling_seed" not in params:
        return gap
    # noise is assigned by rank, so tokens with equal logits may also swap
    race = seeded_race(logits, params, position=len(prompt) + k - 1)
    return min(gap, abs(race[one] - race[two]).item())


def seeded_race(logits: torch.Tensor, params: dict[str, Any], *, position: int) -> torch.Tensor:
    """Return SGLang's seeded Gumbel-max scores by token: scaled logits plus noise by rank."""
    ranks = torch.arange(len(logits))
    seed, positions = torch.tensor([params["sampling_seed"]]), torch.tensor([position])
    hashed = _murmur_hash32(None, seed, positions, ranks)[0]
    uniform = hashed.double() / torch.iinfo(torch.uint32).max
    race = torch.full_like(logits, -math.inf)
    order = logits.argsort(descending=True)[: params["top_k"]]
    noise = -(-uniform.log()).log()
    race[order] = logits[order] / params["temperature"] + noise[: params["top_k"]]
    return race


def write_other_weights(folder: Path) -> Path:
    """Write the embedded target with noise added to its weights, and return its folder."""
    folder = folder / "other_weights"
    shutil.copytree(tiny_target(), folder)
    file = folder / "model.safetensors"
    chance = torch.Generator().manual_seed(0)
    noisy = {}
    for name, tensor in load_file(file).items():
        noise = torch.randn(tensor.shape, generator=chance) * tensor.float().std()
        noisy[name] = (tensor.float() + WEIGHT_NOISE * noise).to(tensor.dtype)
    save_file(noisy, file, metadata={"format": "pt"})
    return folder
