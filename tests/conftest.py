"""Set tests up like launch/cpu.sh if there is no GPU: stand-ins on the path, CPU mode on.

With a GPU, tests/gpu.sh starts the servers instead.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import pytest
import torch

from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.server import ROOT, SCHEDULES, Server, ServerProcess
from tests import fork_server

STAND_INS = ROOT / "sglang_dflash" / "glue" / "cpu" / "path"
HAS_GPU = torch.cuda.is_available()

# a shell without job control starts background jobs with Ctrl-C ignored, which every process that a
# test starts would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)

if HAS_GPU:
    Server.script = ROOT / "tests" / "gpu.sh"
else:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if str(STAND_INS) not in sys.path:
        sys.path.insert(0, str(STAND_INS))
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STAND_INS), inherited]))
        importlib.import_module("sglang_dflash_cpu")
    ServerProcess.popen = staticmethod(fork_server.start)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tiny pair's tokenizer."""
    from transformers import AutoTokenizer  # slow to import, and few tests need it

    return AutoTokenizer.from_pretrained(tiny_target())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        default="usual",
        help=f"exactness tests run under each of these (by commas): {', '.join(SCHEDULES)}",
    )
    parser.addoption("--families", help="run tests/e2e/test_families.py with these (by commas)")
    parser.addoption("--long", action="store_true", help="run the long tests, too")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # some pytest releases alternate between schedules, which restarts the servers each time
    items.sort(key=_schedule)
    if hasattr(config, "workerinput"):
        # a worker gets whole files: those with schedules start with the others, not after them
        items.sort(key=lambda item: item.path)
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: make test-long"))
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _schedule(item: pytest.Item) -> int:
    """Return the index of the schedule a test runs under, or -1 if it has none."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("schedule") if callspec else None
    return list(SCHEDULES).index(found) if found in SCHEDULES else -1
