"""The last stage: evaluate the exported drafter in the real decoding loop; write its model card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from sglang_dflash.reference.generate import generate
from sglang_dflash.reference.model import Drafter
from sglang_dflash.reference.rejection import BlockRule
from sglang_dflash.train import answers as store
from sglang_dflash.train.acceptance import Ideal, accept_length, histogram, sample_at
from sglang_dflash.train.model_card import write_card
from sglang_dflash.train.prepare import Run
from sglang_dflash.train.records import read_progress

# (temperature, how drafts are chosen) of each decoding run
EVALUATED = ((0.0, "likeliest"), (1.0, "likeliest"), (1.0, "drawn"))


def evaluate_drafter(
    run: Run, target: PreTrainedModel, held_out: Sequence[store.Answer]
) -> dict[str, Any]:
    """Measure the exported drafter in the real decoding loop and write its model card."""
    config = run.config
    drafter = Drafter.from_pretrained(run.out / "drafter", target.dtype).to(run.device)
    prompts = [answer.prompt_ids.tolist() for answer in held_out[: config.evaluate_prompts]]
    loops = [_decode(run, target, drafter, prompts, *how) for how in EVALUATED]
    scores = run.read("scores.json") | {
        "loops": loops,
        "evaluate_tokens": config.evaluate_tokens,
        "held_out": config.held_out,
        "device": f"{run.device_name}, {str(target.dtype).removeprefix('torch.')}",
    }
    run.write("scores.json", scores)
    path = run.out / "progress.jsonl"
    rows = read_progress(path) if path.exists() else []
    card = write_card(
        config=drafter.config,
        run=run.read("run.json"),
        scores=scores,
        # drop progress after the exported step: a killed run had trained past its last export
        progress=[row for row in rows if row["step"] <= scores.get("step", row["step"])],
    )
    (run.out / "drafter" / "README.md").write_text(card)
    for loop in loops:
        bound = f" (ideal drafter: {loop['ideal']:.2f})" if loop["ideal"] else ""
        print(
            f"train: accept length {loop['accept_length']:.2f} at temperature "
            f"{loop['temperature']:g}, {loop['drafts']} drafts, over {loop['verify_steps']} verify "
            f"steps{bound}",
            flush=True,
        )
    return scores


def _decode(
    run: Run,
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: list[list[int]],
    temperature: float,
    drafts: str,
) -> dict[str, Any]:
    """Decode the prompts with the drafter; return accept length and histogram."""
    seed, ideal = run.config.seed, None
    if drafts == "likeliest":
        ideal = Ideal(sample_at(temperature, seed=seed))
    choose = ideal or BlockRule(temperature, seed=seed)
    generations = []
    for prompt in store.watch(prompts, f"evaluate at temperature {temperature:g}, {drafts} drafts"):
        generation = generate(
            target,
            drafter,
            prompt,
            max_new_tokens=run.config.evaluate_tokens,
            eos_token_ids=run.stop,
            choose=choose,
        )
        if ideal:
            ideal.count(generation, prompt_len=len(prompt), block_size=drafter.config.block_size)
        generations.append(generation)
    return {
        "temperature": temperature,
        "drafts": drafts,
        "prompts": len(prompts),
        "verify_steps": sum(len(g.blocks) for g in generations),
        "accept_length": accept_length(generations),
        "ideal": ideal and ideal.accept_length,
        "histogram": histogram(generations),
    }
