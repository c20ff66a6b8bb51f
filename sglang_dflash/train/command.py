"""`python -m sglang_dflash train`: from a target and prompts to a drafter folder, in stages.

    answers    OUT/answers-*.jsonl.gz: the target's own answers
    train      OUT/checkpoint.pt, OUT/progress.jsonl, OUT/drafter/
    evaluate   OUT/scores.json, and the card in OUT/drafter/

With `--resume` every stage continues from the files in OUT. A run limited by `--steps` is
reproducible: interrupted and resumed, it ends with the same weights, bit for bit on a CPU.
"""

from __future__ import annotations

import argparse
import sys

from transformers.utils import logging as transformers_logging

from sglang_dflash.train.answer_stage import Engine, collect_answers
from sglang_dflash.train.config import Invocation
from sglang_dflash.train.evaluate_stage import evaluate_drafter
from sglang_dflash.train.prepare import load_target, prepare
from sglang_dflash.train.stop import Stop, resume_command
from sglang_dflash.train.train_stage import train_drafter


def run_train(
    options: argparse.Namespace,
    invocation: Invocation,
    *,
    engine: Engine | None = None,
    stop: Stop,
) -> int:
    """Run the requested stages that are not yet done; return 2 if one of them cannot go on."""
    transformers_logging.disable_progress_bar()
    try:
        return _run_stages(options, invocation, engine=engine, stop=stop)
    except (OSError, ValueError) as error:
        # messages of libraries may have several lines
        print(f"train: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2


def _run_stages(
    options: argparse.Namespace, invocation: Invocation, *, engine: Engine | None, stop: Stop
) -> int:
    run = prepare(options, invocation)
    answers = collect_answers(run, engine)
    config = run.config
    if config.stop_after == "answers":
        return 0
    target = load_target(run)
    if not config.evaluate_only:
        finished = train_drafter(
            target,
            run.drafter,
            begin_with=run.begin_with,
            answers=answers,
            config=config,
            pad_id=run.pad_id,
            stop=stop,
        )
        if not finished:
            if not stop.asked:
                print(f"train: paused. Continue with:\n{resume_command(config)}", flush=True)
            return 0
    if config.stop_after == "train":
        return 0
    evaluate_drafter(run, target, answers.held_out)
    print(f"train: {run.out / 'drafter'} is ready", flush=True)
    return 0
