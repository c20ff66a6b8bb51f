"""Answers of other runs: where they come from, and that they are this run's target's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.train.answers import Answer, read_answers
from sglang_dflash.train.config import TrainConfig, flag
from sglang_dflash.train.prompts import sha256
from sglang_dflash.train.records import read_record


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where answers come from, for the model card."""

    files: list[dict[str, Any]]  # of prompts
    engine: str
    commands: list[str]  # of the other runs that generated them


def read_other_runs(config: TrainConfig, *, vocab_size: int) -> dict[str, Answer]:
    """Return the answers in --answers, sorted by key; raise ValueError for another target's, and
    for different ones with one key."""
    for path in config.answers:
        if not path.is_file():
            raise ValueError(
                f"--answers names {path}, which is not a file. Pass the answers-*.jsonl.gz that "
                "`train` wrote to the --out folder of another run."
            )
        _check_settings(path, config)
    found: dict[str, Answer] = {}
    sources: dict[str, Path] = {}
    for path in config.answers:
        answers = read_answers([path])
        _check_ids(path, answers, vocab_size=vocab_size)
        for key in sorted(answers.keys() & found.keys()):
            if answers[key] != found[key]:
                raise ValueError(
                    f"--answers {sources[key]} and {path} have different answers with the key "
                    f"{key}. Pass only one of these files, or the answers of runs that shared "
                    "their prompts with --share."
                )
        found |= answers
        sources |= dict.fromkeys(answers, path)
    return dict(sorted(found.items()))


def origin_of(paths: Sequence[Path]) -> Origin:
    """Return the origin of other runs' answers.

    An answer file without a run.json beside it is listed as its own prompt file.
    """
    files: dict[str, dict[str, Any]] = {}
    engines, commands = set(), dict[str, None]()
    for path in paths:
        run = read_record(_beside(path))
        named = run.get("files") or [{"name": path.name, "rows": "answers", "sha256": sha256(path)}]
        files |= {file["sha256"]: file for file in named}
        engines.add(run.get("answers", {}).get("engine", "another run"))
        commands |= dict.fromkeys(run.get("commands", []))
    return Origin(
        files=list(files.values()), engine=" and ".join(sorted(engines)), commands=list(commands)
    )


def _beside(path: Path) -> Path:
    return path.parent / "run.json"


def _check_settings(path: Path, config: TrainConfig) -> None:
    """Raise ValueError if the run that made the answers had another target or thinking setting."""
    beside = _beside(path)
    settings = read_record(beside).get("settings")
    if settings is None:
        print(
            f"train: {path} has no run.json beside it, so whether its answers are those of "
            f"{config.model_path} cannot be checked",
            flush=True,
        )
        return
    agrees = {
        # a folder that was moved keeps its name
        "model_path": Path(settings["model_path"]).name == Path(config.model_path).name,
        "thinking": settings["thinking"] == config.thinking,
    }
    wrong = [
        f"{flag(name)} is {getattr(config, name)} here and was {settings[name]} there"
        for name, is_same in agrees.items()
        if not is_same
    ]
    if wrong:
        raise ValueError(
            f"--answers {path} was made by a run with other settings ({beside}): "
            f"{'; '.join(wrong)}. Pass the same settings, or answers that were made with these."
        )


def _check_ids(path: Path, answers: Mapping[str, Answer], *, vocab_size: int) -> None:
    for answer in answers.values():
        ids = answer.prompt_ids + answer.answer_ids
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"--answers {path}: the answer {answer.key} has token id {token_id}, but the "
                    f"target has a vocabulary of {vocab_size}. Pass answers of this target."
                )
