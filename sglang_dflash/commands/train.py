"""The trainer, which generates answers with SGLang's offline engine if SGLang is installed."""

from __future__ import annotations

import argparse

from sglang_dflash.glue import release
from sglang_dflash.glue.programs.offline_engine import offline_engine
from sglang_dflash.train import command
from sglang_dflash.train.config import Invocation
from sglang_dflash.train.stop import Stop


def run_train(options: argparse.Namespace, invocation: Invocation, stop: Stop) -> int:
    """Run the remaining stages of a training run; return the exit status."""
    engine = offline_engine if release.installed() else None
    return command.run_train(options, invocation, engine=engine, stop=stop)
