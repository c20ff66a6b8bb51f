"""Without a GPU, tests see SGLang as launch/cpu.sh does: stand-ins on the path, CPU mode on.

With one, servers are started by tests/gpu.sh instead.
"""

from __future__ import annotations

import os
import runpy
import sys

import pytest
import torch

from schedules import SCHEDULES
from server import ROOT, Server

STAND_INS = ROOT / "sglang_dflash" / "glue" / "cpu" / "path"
HAS_GPU = torch.cuda.is_available()

if HAS_GPU:
    Server.script = ROOT / "tests" / "gpu.sh"
else:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if str(STAND_INS) not in sys.path:
        sys.path.insert(0, str(STAND_INS))
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STAND_INS), inherited]))
        # what this defines must stay alive as long as torchvision does
        SITECUSTOMIZE = runpy.run_path(str(STAND_INS / "sitecustomize.py"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        default="usual",
        help=f"exactness tests run under each of these (by commas): {', '.join(SCHEDULES)}",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = group_by_schedule(items)
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def group_by_schedule(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with those of one schedule together, where the first of them stood.

    Some releases of pytest go back and forth between schedules, with new servers each time.
    """
    schedules = {item: _schedule(item) for item in items}
    together = [item for item in items if schedules[item]]
    if not together:
        return items
    names = list(SCHEDULES)
    together.sort(key=lambda item: names.index(schedules[item]))
    first = next(i for i, item in enumerate(items) if schedules[item])
    return items[:first] + together + [item for item in items[first:] if not schedules[item]]


def _schedule(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("schedule") if callspec else None
    return found if found in SCHEDULES else None
