"""The smoke test itself, as far as a CPU can run it: small shapes, one family, real servers."""

from __future__ import annotations

import pytest
import torch

from tests.smoke import run
from tests.smoke.checks import EXACT, SEEDED, Checks

BY_NAME = {family.name: family for family in run.FAMILIES}


@pytest.mark.skipif(torch.cuda.is_available(), reason="`make smoke` runs all of it")
def test_a_family_passes_on_a_cpu() -> None:
    found = run.run_family(BY_NAME["gemma4"], small=True)
    assert run.is_fine(found), found
    checks = found["checks"]["exact"]
    assert {f"{kind}, 12 requests" for kind in EXACT} <= set(checks)
    assert "our worker, plan_stream" in checks


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="`make smoke` runs all of it")
def test_a_family_with_linear_attention_passes_on_a_cpu() -> None:
    found = run.run_family(BY_NAME["qwen3.5"], small=True)
    assert run.is_fine(found), found


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="`make smoke` runs all of it")
@pytest.mark.parametrize("name", ["gemma4-int4", "qwen3-awq"])
def test_a_quantised_family_passes_on_a_cpu(name: str) -> None:
    found = run.run_family(BY_NAME[name], small=True)
    assert run.is_fine(found), found


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="`--tp 2` runs all of it")
def test_a_family_passes_on_two_ranks_of_a_cpu() -> None:
    """As on one GPU, but for NCCL and CUDA graphs: both ranks fuse their shards of Gemma's layers,
    experts included, and compare every step."""
    found = run.run_family(BY_NAME["gemma4-moe"], small=True, ranks=2)
    assert run.is_fine(found), found
    exact = found["checks"]["exact"]
    assert {"our worker, layers", "ranks compared in every step"} <= set(exact)
    assert {f"{kind}, as one rank" for kind in EXACT} == set(found["checks"]["plain"])


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="`--tp 2` runs all of it")
def test_seeded_answers_on_two_ranks_of_a_cpu() -> None:
    found = run.run_family(BY_NAME["qwen3"], small=True, ranks=2, seeded=True)
    assert run.is_fine(found), found
    assert {f"{kind}, 12 requests" for kind in SEEDED} <= set(found["checks"]["exact"])


def test_two_ranks_have_families_of_their_own() -> None:
    options = run.parse(["--tp", "2"])
    assert options.families == list(run.ON_TWO_RANKS) and options.is_whole and options.no_recipe
    with pytest.raises(SystemExit):
        run.parse(["--tp", "2", "--families", "llama"])


def test_a_differing_answer_fails() -> None:
    checks = Checks()
    checks.equal("greedy", [[1, 2], [3]], [[1, 2], [4]])
    assert checks.found["greedy"].startswith("answers [1] of 2 differ")
    assert not run.is_fine({"checks": {"exact": checks.found}})


def test_a_server_that_did_not_start_fails() -> None:
    assert not run.is_fine({"error": "RuntimeError", "checks": {}})
