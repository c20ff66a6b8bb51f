"""SGLang's own server, in this process."""

from __future__ import annotations

import runpy
import sys

LAUNCHER = "sglang.launch_server"


def run_server(arguments: list[str]) -> None:
    """Serve until stopped, with SGLang's own arguments."""
    sys.argv = [LAUNCHER, *arguments]
    # processes that SGLang spawns import __main__ again: it must be the stock launcher
    runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
