"""`python -m sglang_dflash serve`: run the doctor's checks, then SGLang's server.

Both run in one process, because importing SGLang takes longer than everything else the doctor does.
A pair that cannot start fails with the reason, before weights are downloaded or loaded.
"""

from __future__ import annotations

import argparse
import sys

from sglang_dflash.commands.doctor import look_at_pair
from sglang_dflash.commands.installation import look_at_installation
from sglang_dflash.glue.programs.server import run_server


def run_serve(options: argparse.Namespace, arguments: list[str]) -> int:
    """Serve until stopped, with SGLang's own arguments; `options` are the ones that describe the
    pair. Return 1 if the doctor finds a reason not to start."""
    findings, _ = look_at_pair(options)
    bad = [f for f in look_at_installation() + findings if f.state == "bad"]
    for finding in bad:
        print(f"{finding.name}: {finding.found}. {finding.advice}", file=sys.stderr)
    if bad:
        return 1
    run_server(arguments)
    return 0
