"""`python -m sglang_dflash train`: from a target and prompts to a drafter folder, in stages.

    answers    OUT/answers-*.jsonl.gz: the target's own answers
    train      OUT/checkpoint.pt, OUT/progress.jsonl, OUT/drafter/
    evaluate   OUT/scores.json, and the card in OUT/drafter/

Every stage continues from what `--resume` finds in OUT. `--steps` makes a run exact: interrupted
and resumed it gives the weights of an uninterrupted one, bit for bit on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from sglang_dflash.reference.generate import generate
from sglang_dflash.reference.model import Drafter, DrafterConfig
from sglang_dflash.reference.rejection import BlockRule
from sglang_dflash.train import answers as store
from sglang_dflash.train.card import versions, write_card
from sglang_dflash.train.evaluate import Ideal, accept_length, histogram, sample_at
from sglang_dflash.train.fit import fit
from sglang_dflash.train.options import (
    FIXED,
    SHAPE,
    check_options,
    default_gamma,
    read_share,
    read_temperatures,
)
from sglang_dflash.train.prompts import check_template, read_prompts, sha256
from sglang_dflash.train.shape import (
    find_drafter,
    load_target_parts,
    make_drafter_config,
    read_drafter_config,
)

# starts an engine for the target's answers; the caller knows one, because only it knows SGLang
Engine = Callable[..., AbstractContextManager[store.Ask]]

# what --thinking tells the chat template
THINKING = {"on": True, "off": False, "default": None}
# answers that are written together: what a call that is cut off loses
ENGINE_GROUP, TRANSFORMERS_GROUP = 2048, 64
# temperature and drafts of the real decoding loop
EVALUATED = ((0.0, "likeliest"), (1.0, "likeliest"), (1.0, "drawn"))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has been checked."""

    options: argparse.Namespace
    device: torch.device
    drafter: DrafterConfig
    begin_with: Path | None  # a drafter to train further
    tokenizer: Any
    stop: tuple[int, ...]

    @property
    def out(self) -> Path:
        return self.options.out

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.stop[0]

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "a CPU"

    def read(self, name: str) -> dict[str, Any]:
        path = self.out / name
        return json.loads(path.read_text()) if path.exists() else {}

    def write(self, name: str, values: dict[str, Any]) -> None:
        (self.out / name).write_text(json.dumps(values, indent=1) + "\n")


def run_train(options: argparse.Namespace, *, engine: Engine | None = None) -> int:
    """Run the stages that are asked for and not yet done; return 2 for a refused request."""
    transformers_logging.disable_progress_bar()
    try:
        run = prepare(options)
        found = collect_answers(run, engine)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    if options.stop_after == "answers":
        return 0
    target = load_target(run)
    if not options.evaluate_only:
        finished = fit(
            target,
            run.drafter,
            begin_with=run.begin_with,
            answers=found,
            options=options,
            pad_id=run.pad_id,
        )
        if not finished:
            print(f"train: paused; continue with --resume --out {run.out}", flush=True)
            return 0
    if options.stop_after == "train":
        return 0
    evaluate_drafter(run, target, found)
    print(f"train: {run.out / 'drafter'} is ready", flush=True)
    return 0


def prepare(options: argparse.Namespace) -> Run:
    """Check everything that can be checked without weights, and claim the out folder."""
    check_options(options)
    config, tokenizer, stop = load_target_parts(options.model_path)
    check_template(tokenizer, THINKING[options.thinking])
    if not stop:
        raise ValueError(
            f"{options.model_path} names no token that ends an answer. Set eos_token_id in its "
            "generation_config.json."
        )
    if options.max_length > config.max_position_embeddings:
        raise ValueError(
            f"--max-length {options.max_length} is more than the {config.max_position_embeddings} "
            "positions of the target. Lower it."
        )
    begin_with = find_drafter(options.init_from) if options.init_from else None
    if begin_with:
        drafter = read_drafter_config(begin_with, config)
    else:
        asked = {name: getattr(options, name) for name in SHAPE}
        drafter = make_drafter_config(config, tokenizer, **asked, stop=stop)
    if options.gamma is None:
        options.gamma = default_gamma(drafter.block_size)
    device = _device(options.device)
    if options.optimizer == "auto":
        options.optimizer = "muon" if device.type == "cuda" else "adamw"
    run = Run(
        options=options,
        device=device,
        drafter=drafter,
        begin_with=begin_with,
        tokenizer=tokenizer,
        stop=stop,
    )
    _claim(run)
    return run


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError(
            "--device cuda was asked for but torch finds no GPU. Pass --device cpu, or install a "
            "torch built for CUDA."
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _claim(run: Run) -> None:
    """Refuse a folder that holds another run; write run.json."""
    options, known = run.options, run.read("run.json")
    left = (*store.answer_files(run.out), run.out / "checkpoint.pt", run.out / "drafter")
    if not any(path.exists() for path in left):
        # a call that was refused after this left nothing worth keeping
        known = {}
    if known and not (options.resume or options.evaluate_only):
        raise ValueError(
            f"--out {run.out} already holds a run for {known['settings']['model_path']}. Pass "
            "--resume to continue it, or another folder."
        )
    if options.evaluate_only and not (known and (run.out / "drafter" / "config.json").exists()):
        raise ValueError(f"--evaluate-only found no drafter in {run.out / 'drafter'}. Train first.")
    settings = {name: getattr(options, name) for name in FIXED}
    was = known.get("settings", settings)
    changed = [
        f"{n} was {was.get(n)!r}, now {settings[n]!r}" for n in FIXED if was.get(n) != settings[n]
    ]
    if changed:
        raise ValueError(
            f"--out {run.out} holds a run with other settings: {'; '.join(changed)}. Repeat the "
            "earlier ones, or pass another folder."
        )
    if options.evaluate_only:
        return
    run.out.mkdir(parents=True, exist_ok=True)
    command = "python -m sglang_dflash " + shlex.join(options.command_line)
    fresh = {
        "settings": settings,
        "commands": [*known.get("commands", []), command],
        "device": run.device_name,
        "versions": versions(),
        "licence": options.licence,
    }
    run.write("run.json", {"files": [], "answers": {}} | known | fresh)


def collect_answers(run: Run, engine: Engine | None) -> dict[str, store.Answer]:
    """Return the answers to train on, generating what is missing."""
    options, commands = run.options, []
    if options.answers:
        found = store.read_answers(options.answers)
        files, made_by, commands = _origin(options.answers)
    else:
        found = store.read_answers(store.answer_files(run.out), repair=True)
        files, made_by = run.read("run.json")["files"], "an earlier call"
        if options.prompts:
            files, made_by = generate_answers(run, engine, known=found)
            found = store.read_answers(store.answer_files(run.out))
    if len(found) <= options.held_out:
        raise ValueError(
            f"{len(found)} answers were found and --held-out is {options.held_out}: nothing is "
            "left to train on. Pass more --prompts or --answers, or hold out fewer."
        )
    _note_answers(run, found, files=files, made_by=made_by, commands=commands)
    return found


def _origin(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], str, list[str]]:
    """Return the prompt files that answers of other runs go back to, what answered, and the
    commands; the files of answers themselves where no finished run is beside them."""
    files: dict[str, dict[str, Any]] = {}
    engines, commands = set(), dict[str, None]()
    for path in paths:
        beside = path.parent / "run.json"
        run = json.loads(beside.read_text()) if beside.exists() else {}
        named = run.get("files") or [{"name": path.name, "rows": "answers", "sha256": sha256(path)}]
        files |= {file["sha256"]: file for file in named}
        engines.add(run.get("answers", {}).get("engine", "another run"))
        commands |= dict.fromkeys(run.get("commands", []))
    return list(files.values()), " and ".join(sorted(engines)), list(commands)


def generate_answers(
    run: Run, engine: Engine | None, *, known: dict[str, store.Answer]
) -> tuple[list[dict[str, Any]], str]:
    """Answer the prompts that have no answer yet; return the files and what answered."""
    options = run.options
    prompts = read_prompts(
        options.prompts,
        tokenizer=run.tokenizer,
        thinking=THINKING[options.thinking],
        max_length=options.max_length,
    )
    questions = store.make_questions(
        prompts.token_ids,
        held_out=options.held_out,
        temperatures=read_temperatures(options.temperatures),
        per_prompt=options.answers_per_prompt,
        max_new_tokens=options.max_new_tokens,
        max_length=options.max_length,
        seed=options.seed,
    )[read_share(options.share)]
    missing = [question for question in questions if question.key not in known]
    kind = options.engine
    if kind == "auto":
        kind = "sglang" if run.device.type == "cuda" and engine is not None else "transformers"
    print(
        f"train: {len(prompts.token_ids)} prompts ({prompts.repeated} repeated and "
        f"{prompts.too_long} too long left out), {len(missing)} answers to generate with {kind}",
        flush=True,
    )
    files = [asdict(file) for file in prompts.files]
    if not missing:
        return files, kind
    seconds = options.answer_minutes * 60 if options.answer_minutes else None
    write = {"stop": run.stop, "folder": run.out, "seconds": seconds}
    if kind == "transformers":
        target = load_target(run)
        ask = store.ask_transformers(target, stop=run.stop, pad_id=run.pad_id, seed=options.seed)
        store.answer_questions(missing, ask=ask, group=TRANSFORMERS_GROUP, **write)
        return files, kind
    if engine is None:
        raise ValueError("--engine sglang was asked for but SGLang is not installed here.")
    began = time.monotonic()
    with engine(
        options.model_path,
        stop=run.stop,
        seed=options.seed,
        max_length=options.max_length,
        rows=options.engine_rows,
        attention_backend=options.attention_backend,
    ) as ask:
        print(f"train: engine ready after {time.monotonic() - began:.0f} s", flush=True)
        store.answer_questions(missing, ask=ask, group=ENGINE_GROUP, **write)
    return files, kind


def _note_answers(
    run: Run,
    found: dict[str, store.Answer],
    *,
    files: list[dict[str, Any]],
    made_by: str,
    commands: list[str],
) -> None:
    values = run.read("run.json")
    if made_by == "an earlier call":
        made_by = values["answers"].get("engine", made_by)
    values["files"] = files
    values["answers"] = {
        "count": len(found),
        "tokens": sum(len(answer.answer_ids) for answer in found.values()),
        "stopped": sum(answer.finish == "stop" for answer in found.values()),
        "held_out": run.options.held_out,
        "temperatures": _temperatures(found.values()),
        "engine": made_by,
        "commands": commands,
    }
    run.write("run.json", values)
    print(
        f"train: {values['answers']['count']} answers, {values['answers']['tokens']} tokens, "
        f"{values['answers']['stopped']} ended by themselves",
        flush=True,
    )


def _temperatures(answers: Iterable[store.Answer]) -> str:
    # as they are, not as this call's options would have them
    counts = Counter(answer.temperature for answer in answers)
    return ", ".join(f"{t:g} ({counts[t]} answers)" for t in sorted(counts))


def load_target(run: Run) -> PreTrainedModel:
    """Load the target frozen, in the dtype it will be served in."""
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(
        run.options.model_path, dtype=dtype, attn_implementation="sdpa"
    )
    return target.to(run.device).eval().requires_grad_(False)


def evaluate_drafter(
    run: Run, target: PreTrainedModel, answers: dict[str, store.Answer]
) -> dict[str, Any]:
    """Measure the exported drafter in the real loop and write its card."""
    options = run.options
    drafter = Drafter.from_pretrained(run.out / "drafter", target.dtype).to(run.device)
    keys = list(answers)[: min(options.held_out, options.evaluate_prompts)]
    prompts = [answers[key].prompt_ids.tolist() for key in keys]
    loops = [_decode(run, target, drafter, prompts, *how) for how in EVALUATED]
    scores = run.read("scores.json") | {
        "loops": loops,
        "evaluate_tokens": options.evaluate_tokens,
        "held_out": options.held_out,
        "device": f"{run.device_name}, {str(target.dtype).removeprefix('torch.')}",
    }
    run.write("scores.json", scores)
    path = run.out / "progress.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    card = write_card(
        config=drafter.config,
        run=run.read("run.json"),
        scores=scores,
        # a run that was killed had gone on from the drafter it left
        progress=[row for row in rows if row["step"] <= scores.get("step", row["step"])],
    )
    (run.out / "drafter" / "README.md").write_text(card)
    for loop in loops:
        bound = f" (an ideal drafter's: {loop['ideal']:.2f})" if loop["ideal"] else ""
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
    """Answer the prompts in the real loop; return what was accepted."""
    seed, ideal = run.options.seed, None
    if drafts == "likeliest":
        ideal = Ideal(sample_at(temperature, seed=seed))
    choose = ideal or BlockRule(temperature, seed=seed)
    generations = []
    for prompt in store.watch(prompts, f"evaluate at temperature {temperature:g}, {drafts} drafts"):
        generation = generate(
            target,
            drafter,
            prompt,
            max_new_tokens=run.options.evaluate_tokens,
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
