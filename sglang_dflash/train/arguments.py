"""Arguments of `python -m sglang_dflash train`, and the config made from them. Needs no torch."""

from __future__ import annotations

import argparse
import math
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
    return f"default: {gpu}, on a CPU {cpu}"


def add_train_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", required=True, help="target: a Hugging Face folder or model name")
    add("--out", type=Path, required=True, help="folder for answers, checkpoint and drafter/")
    add(
        "--resume",
        action="store_true",
        help="continue the run in --out at the stage it has reached",
    )
    add("--stop-after", choices=("answers", "train"), help="skip the stages after this one")
    add("--evaluate-only", action="store_true", help="only evaluate the drafter in --out again")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: the GPU if there is one; default: %(default)s",
    )
    add(
        "--seed",
        type=int,
        default=TrainConfig.seed,
        help="of all random choices; default: %(default)s",
    )
    add(
        "--licence",
        default=TrainConfig.licence,
        help="licence to state in the model card; default: %(default)s",
    )
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
        help="JSONL with `prompt`, `messages` (up to the last user turn) or `turns` (of a user, "
        "each asked after the answer to the one before), or .txt with one prompt per line",
    )
    add(
        "--answers",
        type=Path,
        nargs="+",
        default=TrainConfig.answers,
        help="answers of another run, instead of --prompts",
    )
    _add_engine(group)
    add(
        "--answers-per-prompt",
        type=int,
        default=TrainConfig.answers_per_prompt,
        help="all but the first are sampled; default: %(default)s",
    )
    add("--max-new-tokens", type=int, help=_default("max_new_tokens"))
    add("--max-length", type=int, help=f"tokens of prompt and answer; {_default('max_length')}")
    add("--answer-minutes", type=float, help="stop generating after this many minutes")
    add(
        "--share",
        default="1/1",
        help="K/N: answer only every N-th prompt, starting with the K-th; N parallel runs, "
        "each with its own --out, keep a GPU busier than one, and --answers takes the files "
        "of all of them; default: 1/1",
    )
    add(
        "--temperatures",
        nargs="+",
        default=["0:50", "0.7:25", "1:25"],
        help="TEMPERATURE:SHARE ...; default: 0:50 0.7:25 1:25; held-out prompts are always "
        "answered greedily",
    )
    add(
        "--thinking",
        choices=("on", "off", "default"),
        default=TrainConfig.thinking,
        help="enable_thinking of the chat template, as in serving; default: default, the "
        "template's own",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    """Add what generates the answers."""
    add = group.add_argument
    add(
        "--engine",
        choices=("auto", "sglang", "transformers"),
        default=TrainConfig.engine,
        help="what generates answers; auto: sglang on a GPU, if installed; default: %(default)s",
    )
    add(
        "--attention-backend",
        default=TrainConfig.attention_backend,
        help="of the SGLang engine; default: %(default)s",
    )
    add(
        "--engine-rows",
        type=int,
        default=TrainConfig.engine_rows,
        help="prompts that the engine answers concurrently; default: %(default)s",
    )


def _add_drafter(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--init-from",
        help="drafter to continue training, a folder or model name; its shape is kept",
    )
    add("--layers", type=int, help=f"default: {DrafterShape.layers}")
    add("--block-size", type=int, help=f"default: {DrafterShape.block_size}")
    add(
        "--target-layer-ids",
        type=int,
        nargs="+",
        help="default: five, spread from the second layer to the third-last",
    )
    add(
        "--mask-token-id",
        type=int,
        help="default: the tokenizer's mask token; else the first embedding row that no token "
        "uses; else the last special token that the chat template does not contain",
    )
    add(
        "--sliding-window",
        type=int,
        help="window of every layer but the last, in tokens; default: full attention in all layers",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--steps", type=int, help=f"{_default('steps')}, unless --minutes is given")
    add(
        "--minutes",
        type=float,
        help="training time, resumed runs included; --steps may end it earlier",
    )
    add("--pause-after", type=float, help="write a checkpoint and exit after this many minutes")
    add(
        "--checkpoint-every",
        type=float,
        default=TrainConfig.checkpoint_every,
        help="in minutes; default: %(default)g",
    )
    add("--tokens-per-batch", type=int, help=f"padding included; {_default('tokens_per_batch')}")
    add(
        "--anchors",
        type=int,
        help=f"blocks in a sequence of --max-length tokens; {_default('anchors')}",
    )
    add(
        "--optimizer",
        choices=("auto", "muon", "adamw"),
        help="auto: muon on a GPU, adamw on a CPU, where Muon's bf16 GEMMs may take seconds",
    )
    add(
        "--learning-rate",
        type=float,
        default=TrainConfig.learning_rate,
        help="highest rate; default: %(default)g",
    )
    add(
        "--labels",
        choices=("soft", "hard"),
        default=TrainConfig.labels,
        help="soft: the target's distribution at each token; hard: only the token it generated; "
        f"default: {TrainConfig.labels}",
    )
    add(
        "--loss",
        choices=("decay", "dpace"),
        default=TrainConfig.loss,
        help="weight of a position in its block; dpace: the number of drafts expected to be "
        "accepted from there on (D-PACE); decay: falls exponentially, see --gamma; default: "
        f"{TrainConfig.loss}",
    )
    add(
        "--gamma",
        type=float,
        help="decay constant of --loss decay; default: 7 for block 16, 5 for 10, 4 for 8",
    )
    _add_implementation(group)


def _add_implementation(group: argparse._ArgumentGroup) -> None:
    """Add what changes speed and memory, but not what is learnt."""
    add = group.add_argument
    add(
        "--chunk-rows",
        type=int,
        default=TrainConfig.chunk_rows,
        help="rows of logits held in memory at once; default: %(default)s",
    )
    add(
        "--attention",
        choices=("auto", "sdpa", "flex"),
        default=TrainConfig.attention,
        help="attention implementation for the blocks; default: %(default)s",
    )


def _add_evaluation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--held-out", type=int, help=f"prompts excluded from training; {_default('held_out')}")
    add(
        "--evaluate-prompts",
        type=int,
        help=f"held-out prompts to run in the real decoding loop; {_default('evaluate_prompts')}",
    )
    add(
        "--evaluate-tokens",
        type=int,
        help=f"maximum tokens per answer in that loop; {_default('evaluate_tokens')}",
    )


def read_temperatures(texts: list[str]) -> dict[float, float]:
    """Return temperature -> share from TEMPERATURE or TEMPERATURE:SHARE."""
    found: dict[float, float] = {}
    for text in texts:
        first, _, second = text.partition(":")
        try:
            temperature, share = float(first), float(second or 1)
        except ValueError:
            raise ValueError(
                f"--temperatures has {text!r}. Write TEMPERATURE or TEMPERATURE:SHARE, "
                "for example 0:50 0.7:25 1:25."
            ) from None
        if not (0 <= temperature < math.inf and 0 < share < math.inf):
            raise ValueError(
                f"--temperatures has {text!r}. Pass a finite temperature of 0 or more, and a "
                "finite share above 0."
            )
        if temperature in found:
            raise ValueError(
                f"--temperatures has {text!r}, but temperature {temperature:g} was already given. "
                "Pass each temperature once."
            )
        found[temperature] = share
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
            f"With --init-from {options.init_from} the drafter's shape is fixed. Drop "
            f"{', '.join(map(flag, given))}."
        )
    return None
