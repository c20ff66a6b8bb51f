"""Types of KV that a card, or the drafter's attention, cannot read are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.glue import release
from sglang_dflash.kernels import cards
from sglang_dflash.kernels.cards import Card
from tests.glue.test_server_args import ON_GPU, parse


def test_a_cache_that_the_card_cannot_read_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the compiler ends the server at its first step."""
    monkeypatch.setattr(cards, "current", lambda: Card((8, 6)))
    e4m3 = (*ON_GPU, "--kv-cache-dtype", "fp8_e4m3")
    with pytest.raises(ValueError, match="e4m3 needs compute capability 8.9.*has 8.6.*fp8_e5m2"):
        parse(models, *e4m3)
    assert parse(models, *ON_GPU, "--kv-cache-dtype", "fp8_e5m2").kv_cache_dtype == "fp8_e5m2"
    monkeypatch.setattr(cards, "current", lambda: Card((8, 9)))
    assert parse(models, *e4m3).kv_cache_dtype == "fp8_e4m3"


@pytest.mark.skipif(release.installed() == "0.5.17", reason="this release has no such option")
def test_a_type_of_draft_kv_that_cannot_be_had_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fa4 SGLang drops what was asked for, and says so among hundreds of lines."""
    asked = ("--speculative-draft-kv-cache-dtype", "fp8_e4m3")
    with pytest.raises(ValueError, match="--speculative-draft-kv-cache-dtype fp8_e4m3 needs a GPU"):
        parse(models, *asked)
    monkeypatch.setattr(cards, "current", lambda: Card((8, 6)))
    with pytest.raises(ValueError, match="draft-kv-cache-dtype fp8_e4m3 needs compute capability"):
        parse(models, *ON_GPU, *asked)
    monkeypatch.setattr(cards, "current", lambda: Card((9, 0)))
    assert parse(models, *ON_GPU, *asked).speculative_draft_attention_backend == "triton"
    with pytest.raises(ValueError, match="fa4 cannot run.*draft KV in fp8_e4m3.*backend triton"):
        parse(models, *ON_GPU, *asked, "--speculative-draft-attention-backend", "fa4")
    same = (*ON_GPU, "--speculative-draft-kv-cache-dtype", "bf16")
    assert parse(models, *same).speculative_draft_attention_backend == "fa4"
