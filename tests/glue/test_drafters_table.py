"""docs/drafters.md: written by the checks that a server runs, and up to date."""

from __future__ import annotations

import pytest

from sglang_dflash.commands.drafters import row, table, why_refused
from sglang_dflash.released_drafters import QWEN3, QWEN3_NEXT, RELEASED, Released, Target
from sglang_dflash.testing.server import ROOT


def test_the_table_is_up_to_date() -> None:
    """Otherwise write it again: python -m sglang_dflash drafters > docs/drafters.md"""
    assert (ROOT / "docs" / "drafters.md").read_text() == table()


@pytest.mark.parametrize("released", RELEASED, ids=lambda each: each.names)
def test_a_drafter_is_tested_or_said_not_to_be(released: Released) -> None:
    _, verdict, why, tested = row(released)
    assert why
    if verdict == "served":
        assert (ROOT / tested).exists()
    else:
        assert not released.tested


@pytest.mark.parametrize(
    ("released", "reason"),
    [
        (Released(names="plain", target=QWEN3), None),
        (Released(names="bias", config={"mlp_bias": True}), "mlp_bias True"),
        (Released(names="gated delta net", target=QWEN3_NEXT), None),
        (Released(names="other states", target=Target("lfm2", "Lfm2ForCausalLM")), "Mamba layers"),
        (
            Released(names="other", is_speculators=True, config={"speculators_model_type": "mtp"}),
            "type 'mtp'",
        ),
    ],
    ids=lambda each: each.names if isinstance(each, Released) else "",
)
def test_verdicts_are_those_of_the_checks(released: Released, reason: str | None) -> None:
    found = why_refused(released)
    if reason is None:
        assert found is None
    else:
        assert found is not None and reason in found
