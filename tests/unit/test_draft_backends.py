"""The drafter's attention backend: a default for each card, and a refusal that names others."""

from __future__ import annotations

import pytest

from sglang_dflash import draft_backends
from sglang_dflash.draft_backends import Place, able_backends, choose_draft_backend
from sglang_dflash.drafter_config import SUPPORTED_LAYER_TYPES
from tests.unit.test_config import drafter

CPU = Place("cpu", None, is_fp32=True)


def on(major: int, minor: int, *, is_fp32: bool = False) -> Place:
    return Place("cuda", (major, minor), is_fp32)


# asked for on a Hopper card
FP8_KV = Place("cuda", (9, 0), is_fp32=False, kv_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("place", "default"),
    [
        pytest.param(on(8, 0), "triton", id="A100"),
        pytest.param(on(8, 6), "triton", id="RTX 3090"),
        pytest.param(on(8, 9), "triton", id="RTX 4090"),
        pytest.param(on(9, 0), "fa4", id="H200"),
        pytest.param(on(10, 0), "fa4", id="B200"),
        pytest.param(on(10, 3), "fa4", id="B300"),
        pytest.param(on(12, 0), "triton", id="RTX 5090"),
        pytest.param(on(9, 0, is_fp32=True), "triton", id="fp32"),
        pytest.param(CPU, "torch_native", id="cpu"),
        pytest.param(FP8_KV, "triton", id="FP8 draft KV"),
    ],
)
def test_each_card_has_a_default(place: Place, default: str) -> None:
    assert choose_draft_backend(drafter(), place, asked=None) == default


def test_what_was_asked_for_is_used_where_it_runs() -> None:
    for asked in ("fa4", "fa3", "triton", "flashinfer"):
        assert choose_draft_backend(drafter(), on(9, 0), asked=asked) == asked
    sliding = drafter(layer_types=["sliding_attention"] * 2)
    assert choose_draft_backend(sliding, on(9, 0), asked="trtllm_mha") == "trtllm_mha"


@pytest.mark.parametrize(
    ("place", "asked", "message"),
    [
        (
            on(8, 9),
            "fa4",
            r"fa4 cannot run.*cuda, compute capability 8.9 \(layers: .* triton or fa3",
        ),
        (on(12, 0), "fa4", "capability 12.0 .* triton or flashinfer, or drop it for triton"),
        (on(10, 0), "fa3", "fa3 cannot run.*fa4 or triton or flashinfer, or drop it for fa4"),
        (on(9, 0, is_fp32=True), "fa4", "capability 9.0, fp32 .*backend triton, or drop it"),
        (on(9, 0), "trtllm_mha", r"\(layers: full_attention, sliding_attention\).*fa4 or triton"),
        (on(9, 0), "torch_native", "torch_native cannot run"),
        (FP8_KV, "fa4", "capability 9.0, draft KV in fp8_e4m3 .*Pass .*backend triton, or drop it"),
        (CPU, "triton", "on cpu, fp32 .*Pass --speculative-draft-attention-backend torch_native"),
    ],
)
def test_what_cannot_run_is_refused_with_the_alternatives(
    place: Place, asked: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_draft_backend(drafter(), place, asked=asked)


def test_every_drafter_has_a_backend_everywhere() -> None:
    """The default is the first one: without any, a start would end in an IndexError."""
    for device in draft_backends.BY_DEVICE:
        for is_fp32 in (False, True):
            # a card that no table lists
            place = Place(device, None if device == "cpu" else (13, 0), is_fp32)
            assert able_backends(SUPPORTED_LAYER_TYPES, place)
