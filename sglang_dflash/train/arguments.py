"""Arguments of `python -m sglang_dflash train`, and the config made from them. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sglang_dflash.train.config import (
    BY_DEVICE,
    DrafterShape,
    Invocation,
    TrainConfig,
    check_config,
    flag,
)


def _default(name: str) -> str:
    gpu, cpu = BY_DEVICE[name]
    return f"default {gpu}, on a CPU {cpu}"


def add_train_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", required=True, help="target: a Hugging Face folder or name")
    add("--out", type=Path, required=True, help="folder for answers, checkpoint and drafter/")
    add("--resume", action="store_true", help="continue the run in --out, at whatever stage it is")
    add("--stop-after", choices=("answers", "train"), help="do not run the later stages")
    add("--evaluate-only", action="store_true", help="measure the drafter in --out again")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=TrainConfig.seed)
    add("--licence", default=TrainConfig.licence, help="for the model card")
    _add_answers(parser.add_argument_group("the target's answers"))
    _add_drafter(parser.add_argument_group("the drafter"))
    _add_training(parser.add_argument_group("training"))
    _add_evaluation(parser.add_argument_group("evaluation"))


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prompts",
        type=Path,
        nargs="+",
        default=TrainConfig.prompts,
        help="JSONL with `prompt` or `messages` (up to the last user turn), or .txt, one a line",
    )
    add(
        "--answers",
        type=Path,
        nargs="+",
        default=TrainConfig.answers,
        help="answers of another run, instead of --prompts",
    )
    add("--engine", choices=("auto", "sglang", "transformers"), default=TrainConfig.engine)
    add("--attention-backend", default=TrainConfig.attention_backend, help="of the SGLang engine")
    add(
        "--engine-rows",
        type=int,
        default=TrainConfig.engine_rows,
        help="prompts that the engine answers at once",
    )
    add(
        "--answers-per-prompt",
        type=int,
        default=TrainConfig.answers_per_prompt,
        help="all but the first are sampled",
    )
    add("--max-new-tokens", type=int, help=_default("max_new_tokens"))
    add(
        "--max-length",
        type=int,
        help=f"of prompt and answer together, in tokens; {_default('max_length')}",
    )
    add("--answer-minutes", type=float, help="stop generating after so long")
    add(
        "--share",
        default="1/1",
        help="K/N: ask only every N-th question, from the K-th; N calls, each with its own --out, "
        "keep a GPU busier than one, and --answers takes the files of all",
    )
    add(
        "--temperatures",
        nargs="+",
        default=["0:50", "0.7:25", "1:25"],
        help="TEMPERATURE:SHARE ...; held-out prompts are always answered greedily",
    )
    add(
        "--thinking",
        choices=("on", "off", "default"),
        default=TrainConfig.thinking,
        help="enable_thinking of the chat template, as it will be served",
    )


def _add_drafter(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--init-from", help="a drafter to train further, a folder or name; it brings its shape")
    add("--layers", type=int, help=f"default {DrafterShape.layers}")
    add("--block-size", type=int, help=f"default {DrafterShape.block_size}")
    add(
        "--target-layer-ids",
        type=int,
        nargs="+",
        help="default: five, spread from the second layer to the third-last",
    )
    add(
        "--mask-token-id",
        type=int,
        help="default: the tokenizer's mask token; else the first row of the embedding that no "
        "token uses; else the last special token that the chat template does not name",
    )
    add(
        "--sliding-window",
        type=int,
        help="tokens that every layer but the last sees; default: all layers are full",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--steps", type=int, help=f"{_default('steps')}, without --minutes")
    add("--minutes", type=float, help="train for so long over all --resume; the nearer end counts")
    add("--pause-after", type=float, help="write a checkpoint and end after so many minutes")
    add("--checkpoint-every", type=float, default=TrainConfig.checkpoint_every, help="minutes")
    add("--tokens-per-batch", type=int, help=f"padding included; {_default('tokens_per_batch')}")
    add(
        "--anchors",
        type=int,
        help=f"blocks in a sequence of --max-length tokens; {_default('anchors')}",
    )
    add(
        "--optimizer",
        choices=("auto", "muon", "adamw"),
        help="auto: muon on a GPU, adamw on a CPU, where Muon's bf16 products may take seconds",
    )
    add("--learning-rate", type=float, default=TrainConfig.learning_rate)
    add(
        "--labels",
        choices=("soft", "hard"),
        default=TrainConfig.labels,
        help="what the target predicts for each token, or only the token it said",
    )
    add(
        "--loss",
        choices=("decay", "dpace"),
        default=TrainConfig.loss,
        help="how the slots of a block are weighed",
    )
    add("--gamma", type=float, help="of --loss decay; default 7 for block 16, 5 for 10, 4 for 8")
    add(
        "--chunk-rows",
        type=int,
        default=TrainConfig.chunk_rows,
        help="rows of logits in memory at once",
    )
    add(
        "--attention",
        choices=("auto", "sdpa", "flex"),
        default=TrainConfig.attention,
        help="of the blocks",
    )


def _add_evaluation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--held-out", type=int, help=f"prompts that are never trained on; {_default('held_out')}")
    add(
        "--evaluate-prompts",
        type=int,
        help=f"of these, for the real decoding loop; {_default('evaluate_prompts')}",
    )
    add(
        "--evaluate-tokens",
        type=int,
        help=f"at most, for each answer there; {_default('evaluate_tokens')}",
    )


def read_temperatures(texts: list[str]) -> dict[float, float]:
    """Return temperature -> share from TEMPERATURE or TEMPERATURE:SHARE."""
    found: dict[float, float] = {}
    for text in texts:
        temperature, _, share = text.partition(":")
        try:
            found[float(temperature)] = float(share or 1)
        except ValueError:
            raise ValueError(
                f"--temperatures has {text!r}. Write TEMPERATURE or TEMPERATURE:SHARE, "
                "for example 0:50 0.7:25 1:25."
            ) from None
    if min(found) < 0 or min(found.values()) < 0 or not sum(found.values()):
        raise ValueError(
            f"--temperatures is {' '.join(texts)}. Temperatures and shares must not be negative, "
            "and one share must be above 0."
        )
    return found


def read_share(text: str) -> slice:
    """Return the slice of questions that this call asks, from K/N."""
    share, _, shares = text.partition("/")
    try:
        first, step = int(share), int(shares)
    except ValueError:
        first, step = 0, 0
    if not 1 <= first <= step:
        raise ValueError(f"--share is {text!r}. Write K/N with K from 1 to N, for example 2/3.")
    return slice(first - 1, None, step)


def read_invocation(options: argparse.Namespace, command_line: Sequence[str]) -> Invocation:
    return Invocation(
        command_line=tuple(command_line),
        out=options.out,
        resume=options.resume,
        evaluate_only=options.evaluate_only,
    )


def make_config(
    options: argparse.Namespace,
    *,
    invocation: Invocation,
    device: str,
    before: Mapping[str, Any],
) -> tuple[TrainConfig, str]:
    """Return the checked config, and the defaults chosen for the device, as flags.

    `before` has the settings of the run being continued, which take precedence over the defaults.
    """
    values, chosen = _resolve_defaults(vars(options), device, before)
    shape = _read_shape(options)
    asked = {
        field.name: values[field.name] for field in fields(TrainConfig) if field.name in values
    }
    made = {
        "device": device,
        "prompts": tuple(options.prompts),
        "answers": tuple(options.answers),
        "temperatures": read_temperatures(options.temperatures),
        "share": read_share(options.share),
        "shape": shape,
    }
    config = TrainConfig(**asked | made | asdict(invocation))
    check_config(config)
    return config, " ".join(f"{flag(name)} {value}" for name, value in chosen.items())


def _resolve_defaults(
    asked: Mapping[str, Any], device: str, before: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all values with the device's defaults filled in, and these defaults alone."""
    values, chosen = dict(asked), dict[str, Any]()
    if values["optimizer"] == "auto":
        values["optimizer"] = None
    for name, (gpu, cpu) in BY_DEVICE.items():
        if values[name] is not None or (name == "steps" and values["minutes"]):
            continue
        if name in before:
            values[name] = before[name]
            continue
        values[name] = gpu if device == "cuda" else cpu
        if name == "tokens_per_batch":
            # a long --max-length must fit
            values[name] = max(values[name], values["max_length"])
        chosen[name] = values[name]
    return values, chosen


def _read_shape(options: argparse.Namespace) -> DrafterShape | None:
    names = [field.name for field in fields(DrafterShape)]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if not options.init_from:
        if "target_layer_ids" in given:
            given["target_layer_ids"] = tuple(given["target_layer_ids"])
        return DrafterShape(**given)
    if given:
        raise ValueError(
            f"With --init-from {options.init_from} the shape is that drafter's. "
            f"Drop {', '.join(map(flag, given))}."
        )
    return None
