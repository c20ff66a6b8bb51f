"""The forge's machine has the programs without which tests are skipped."""

from __future__ import annotations

import re

import yaml

from sglang_dflash.testing.server import ROOT
from tests.browser import BROWSERS

TESTS = ROOT / "tests"


def test_no_test_is_skipped_there_for_want_of_a_program() -> None:
    """A skipped test looks like one that passed."""
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    needed = set(re.findall(r'shutil\.which\("(\w+)"\) is None', text))
    assert {"prometheus", "promtool"} <= needed
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    [checked] = [set(step.split()[1:]) for step in steps if step.startswith("which ")]
    assert needed <= checked and checked & set(BROWSERS)
    assert steps.index("make test PYTHON=python") == len(steps) - 1
