"""The arguments of `python -m sglang_dflash train`. Needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

# what decides the data or the weights: a run that continues another must agree in these
FIXED = (
    "model_path",
    "init_from",
    "layers",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "sliding_window",
    "max_length",
    "thinking",
    "held_out",
    "tokens_per_batch",
    "anchors",
    "labels",
    "loss",
    "gamma",
    "optimizer",
    "seed",
)

# a drafter's shape, and what it is unless asked for; None is chosen by the target
SHAPE = {
    "layers": 4,
    "block_size": 16,
    "target_layer_ids": None,
    "mask_token_id": None,
    "sliding_window": 0,
}

# what is chosen by the device unless asked for: on a GPU, and on a CPU, where the tiny target has a
# first drafter in minutes
BY_DEVICE = {
    "max_new_tokens": (512, 128),
    "max_length": (1024, 256),
    "tokens_per_batch": (32768, 512),
    "anchors": (96, 24),
    "optimizer": ("muon", "adamw"),
    "steps": (3000, 600),
    "held_out": (64, 16),
    "evaluate_prompts": (16, 8),
    "evaluate_tokens": (256, 64),
}


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
    add("--seed", type=int, default=0)
    add("--licence", default="not stated", help="for the model card")
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
        default=[],
        help="JSONL with `prompt` or `messages` (up to the last user turn), or .txt, one a line",
    )
    add("--answers", type=Path, nargs="+", help="answers of another run, instead of --prompts")
    add("--engine", choices=("auto", "sglang", "transformers"), default="auto")
    add("--attention-backend", default="triton", help="of the SGLang engine")
    add("--engine-rows", type=int, default=512, help="prompts that the engine answers at once")
    add("--answers-per-prompt", type=int, default=1, help="all but the first are sampled")
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
        default="default",
        help="enable_thinking of the chat template, as it will be served",
    )


def _add_drafter(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--init-from", help="a drafter to train further, a folder or name; it brings its shape")
    add("--layers", type=int, help=f"default {SHAPE['layers']}")
    add("--block-size", type=int, help=f"default {SHAPE['block_size']}")
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
    add("--checkpoint-every", type=float, default=5.0, help="minutes")
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
    add("--learning-rate", type=float, default=1e-3)
    add(
        "--labels",
        choices=("soft", "hard"),
        default="soft",
        help="what the target predicts for each token, or only the token it said",
    )
    add(
        "--loss",
        choices=("decay", "dpace"),
        default="dpace",
        help="how the slots of a block are weighed",
    )
    add("--gamma", type=float, help="of --loss decay; default 7 for block 16, 5 for 10, 4 for 8")
    add("--chunk-rows", type=int, default=4096, help="rows of logits in memory at once")
    add("--attention", choices=("auto", "sdpa", "flex"), default="auto", help="of the blocks")


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
    """Return the questions that a call answers, from K/N."""
    share, _, shares = text.partition("/")
    try:
        first, step = int(share), int(shares)
    except ValueError:
        first, step = 0, 0
    if not 1 <= first <= step:
        raise ValueError(f"--share is {text!r}. Write K/N with K from 1 to N, for example 2/3.")
    return slice(first - 1, None, step)


def default_gamma(block_size: int) -> float:
    """Return the published decay for a block size: 7 for 16, 5 for 10, 4 for 8."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, block_size * 7 / 16))


def settle_defaults(options: argparse.Namespace, device: str, *, before: dict[str, Any]) -> str:
    """Fill in what was left to the device, as the run `before` has it where this continues one;
    return what was chosen here, as flags."""
    if options.optimizer == "auto":
        options.optimizer = None
    chosen = {}
    for name, (gpu, cpu) in BY_DEVICE.items():
        if getattr(options, name) is not None or (name == "steps" and options.minutes):
            continue
        if name in before:
            setattr(options, name, before[name])
            continue
        value = gpu if device == "cuda" else cpu
        if name == "tokens_per_batch":
            # a longer sequence than usual, which was asked for, has room
            value = max(value, options.max_length)
        setattr(options, name, value)
        chosen[name] = value
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())


def check_options(options: argparse.Namespace) -> None:
    """Refuse what can be refused before anything is loaded, and fill in what depends on others."""
    _settle_shape(options)
    if options.prompts and options.answers:
        raise ValueError(
            "Both --prompts and --answers were given. Answers bring their prompts: pass only one."
        )
    least = {
        "layers": 1,
        "block_size": 2,
        "sliding_window": 0,
        "answers_per_prompt": 1,
        "max_new_tokens": 2,
        "max_length": 16,
        "anchors": 1,
        "chunk_rows": 1,
        "held_out": 1,
        "evaluate_prompts": 1,
        "evaluate_tokens": 2,
        "engine_rows": 1,
    }
    for name, low in least.items():
        # a shape that is still to come has been checked
        if getattr(options, name) is not None and getattr(options, name) < low:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is {getattr(options, name)}. Pass {low} or more.")
    if options.tokens_per_batch < options.max_length:
        raise ValueError(
            f"--tokens-per-batch {options.tokens_per_batch} cannot hold one sequence of "
            f"--max-length {options.max_length}. Raise the first or lower the second."
        )
    for name in ("steps", "minutes", "pause_after", "answer_minutes"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}. Pass more than 0.")
    read_temperatures(options.temperatures)
    read_share(options.share)
    if options.gamma is not None and options.loss != "decay":
        raise ValueError(
            f"--gamma {options.gamma:g} was given, but --loss {options.loss} has no such setting. "
            "Add --loss decay, or drop --gamma."
        )


def _settle_shape(options: argparse.Namespace) -> None:
    given = [name for name in SHAPE if getattr(options, name) is not None]
    if options.init_from and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(
            f"With --init-from {options.init_from} the shape is that drafter's. Drop {flags}."
        )
    if not options.init_from:
        for name in SHAPE.keys() - set(given):
            setattr(options, name, SHAPE[name])
