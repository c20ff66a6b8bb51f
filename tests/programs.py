"""Run a program of the project in the process of the tests, whose servers are forked."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock


class Ended(NamedTuple):
    status: int
    output: str  # stdout and stderr


def run(module: str, *words: object, folder: Path) -> Ended:
    """Run `python -m module words` in a folder; servers that it starts have one thread."""
    output = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        mock.patch.object(sys, "argv", [module, *map(str, words)]),
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
    ):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            status: object = 0
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                print(status)
    return Ended(status if isinstance(status, int) else int(status is not None), output.getvalue())
