"""The first stage: the target's own answers to the prompts, generated or taken from other runs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from sglang_dflash.train import answers as store
from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.prepare import Run, load_target
from sglang_dflash.train.prompts import Prompts, read_prompts, sha256

# starts an engine that generates answers; injected, because only glue may import SGLang
Engine = Callable[..., AbstractContextManager[store.Ask]]

# questions per engine call; written together, so an interrupted run loses at most these
ENGINE_GROUP = 2048
# questions grouped into single-temperature batches; each batch is written when complete
TRANSFORMERS_GROUP = 64


def collect_answers(run: Run, engine: Engine | None) -> dict[str, store.Answer]:
    """Return the answers to train on, generating the missing ones."""
    config = run.config
    commands: list[str] = []
    if config.answers:
        found = store.read_answers(config.answers)
        files, made_by, commands = _origin(config.answers)
    else:
        found = store.read_answers(store.answer_files(run.out), repair=True)
        files, made_by = run.read("run.json")["files"], "an earlier call"
        if config.prompts:
            files, made_by = generate_answers(run, engine, known=found)
            found = store.read_answers(store.answer_files(run.out))
    # with --share, one call's answers may be too few; they are joined later
    if len(found) <= config.held_out and config.stop_after != "answers":
        raise ValueError(
            f"{len(found)} answers were found and --held-out is {config.held_out}: nothing is "
            "left to train on. Pass more --prompts or --answers, or hold out fewer."
        )
    _note_answers(run, found, files=files, made_by=made_by, commands=commands)
    return found


def _origin(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], str, list[str]]:
    """Return the provenance of other runs' answers: prompt files, engines, and commands.

    An answer file without a run.json beside it is listed as its own prompt file.
    """
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
    """Answer the prompts that have no answer yet; return the prompt files and the engine used."""
    config = run.config
    prompts = read_prompts(
        config.prompts,
        tokenizer=run.tokenizer,
        thinking=config.enable_thinking,
        max_length=config.max_length,
    )
    _check_held_out(config, prompts, known)
    questions = store.make_questions(
        prompts.token_ids,
        held_out=config.held_out,
        temperatures=config.temperatures,
        per_prompt=config.answers_per_prompt,
        max_new_tokens=config.max_new_tokens,
        max_length=config.max_length,
        seed=config.seed,
    )[config.share]
    kind = config.engine
    if kind == "auto":
        kind = "sglang" if run.device.type == "cuda" and engine is not None else "transformers"
    missing = _missing_parts(questions, kind, known)
    print(
        f"train: {len(prompts.token_ids)} prompts ({prompts.repeated} repeated and "
        f"{prompts.too_long} too long left out), {sum(map(len, missing))} answers to generate with "
        f"{kind}",
        flush=True,
    )
    files = [asdict(file) for file in prompts.files]
    if not missing:
        return files, kind
    seconds = config.answer_minutes * 60 if config.answer_minutes else None
    write = partial(store.answer_questions, missing, stop=run.stop, folder=run.out, seconds=seconds)
    if kind == "transformers":
        target = load_target(run)
        ask = store.ask_transformers(target, stop=run.stop, pad_id=run.pad_id, seed=config.seed)
        write(ask=ask)
        return files, kind
    if engine is None:
        raise ValueError("--engine sglang was asked for but SGLang is not installed here.")
    began = time.monotonic()
    with engine(
        config.model_path,
        stop=run.stop,
        seed=config.seed,
        max_length=config.max_length,
        rows=config.engine_rows,
        attention_backend=config.attention_backend,
    ) as ask:
        print(f"train: engine ready after {time.monotonic() - began:.0f} s", flush=True)
        write(ask=ask)
    return files, kind


def _missing_parts(
    questions: Sequence[store.Question], kind: str, known: dict[str, store.Answer]
) -> list[list[store.Question]]:
    """Return the unanswered questions, in parts that are generated and written together."""
    if kind == "transformers":
        parts = store.in_batches(questions, group=TRANSFORMERS_GROUP, rows=store.ROWS)
    else:
        parts = store.in_groups(questions, ENGINE_GROUP)
    # partition first, then drop answered questions: a resumed run has the same parts
    missing = [[q for q in part if q.key not in known] for part in parts]
    return [part for part in missing if part]


def _check_held_out(config: TrainConfig, prompts: Prompts, known: dict[str, store.Answer]) -> None:
    """Raise ValueError if holding out leaves no prompts, before any answer is generated."""
    # prompts of earlier calls count, since their answers are trained on too
    count = len(prompts.token_ids.keys() | {key.partition(".")[0] for key in known})
    if count <= config.held_out:
        files = ", ".join(str(path) for path in config.prompts)
        raise ValueError(
            f"{files}: {count} prompts ({prompts.repeated} repeated and {prompts.too_long} too "
            f"long left out) and --held-out is {config.held_out}: nothing is left to train on. "
            f"Pass more than {config.held_out} prompts, or hold out fewer."
        )


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
        "held_out": run.config.held_out,
        "temperatures": _temperatures(found.values()),
        "engine": made_by,
        "commands": commands,
    }
    run.write("run.json", values)
    print(
        f"train: {values['answers']['count']} answers, {values['answers']['tokens']} tokens, "
        f"{values['answers']['stopped']} ended on their own",
        flush=True,
    )


def _temperatures(answers: Iterable[store.Answer]) -> str:
    # counted from the answers, which may come from runs with other temperatures
    counts = Counter(answer.temperature for answer in answers)
    return ", ".join(f"{t:g} ({counts[t]} answers)" for t in sorted(counts))
