"""The smoke test itself, as far as a CPU can run it: small shapes, one family, real servers."""

from __future__ import annotations

import pytest
import torch

from tests.smoke import run
from tests.smoke.checks import EXACT, Checks

GEMMA = run.FAMILIES[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="`make smoke` runs all of it")
def test_a_family_passes_on_a_cpu() -> None:
    found = run.run_family(GEMMA, small=True)
    assert run.is_fine(found), found
    checks = found["checks"]["exact"]
    assert {f"{kind}, 12 requests" for kind in EXACT} <= set(checks)
    assert "our worker, plan_stream" in checks


def test_a_differing_answer_fails() -> None:
    checks = Checks()
    checks.equal("greedy", [[1, 2], [3]], [[1, 2], [4]])
    assert checks.found["greedy"].startswith("answers [1] of 2 differ")
    assert not run.is_fine({"checks": {"exact": checks.found}})


def test_a_server_that_did_not_start_fails() -> None:
    assert not run.is_fine({"error": "RuntimeError", "checks": {}})
