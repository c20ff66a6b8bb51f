"""Every kernel compiles for its cards and fits in them, which takes no GPU.

The interpreter checks what a kernel computes, but also runs code that Triton cannot compile, or
that asks for more shared memory than a card has. This is a part of what
`python -m benchmarks.compile_sweep` compiles: every target's shapes for every card.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks import compile_sweep
from benchmarks.compile_sweep import CARDS, LAYERS, Compiled, Layer, compiling_for
from sglang_dflash import kernels
from sglang_dflash.kernels.attention.tiles import Tile, choose_tiles
from sglang_dflash.kernels.cards import Card
from sglang_dflash.kernels.gemma_layer import thin_linear
from tests.kernels.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

A100, A40, RTX_4090, H200, B200, RTX_5090 = CARDS
SLIDING, GLOBAL, QWEN3 = LAYERS[0], LAYERS[1], LAYERS[4]
SMOLLM2 = next(layer for layer in LAYERS if layer.name == "smollm2-135m")
GPT_OSS = next(layer for layer in LAYERS if layer.name == "gpt-oss, sliding")


def kernel_modules() -> list[Any]:
    found = pkgutil.walk_packages(kernels.__path__, "sglang_dflash.kernels.")
    return [importlib.import_module(each.name) for each in found]


def launched_kernels() -> set[str]:
    """Return every kernel that the package launches from Python, found by its grid."""
    found = set()
    for module in kernel_modules():
        indexed = re.findall(r"\b(\w+)\[", Path(module.__file__).read_text())
        found |= {name for name in indexed if isinstance(vars(module).get(name), JITFunction)}
    return found


@pytest.mark.parametrize("card", [A100, H200], ids=["A100", "H200"])
def test_every_kernel_compiles_and_fits(card: Card) -> None:
    """The two kinds of launch: with and without PDL."""
    with compiling_for(card) as compiler:
        compile_sweep.launch_ops(torch.bfloat16)
        compile_sweep.launch_products(card)
        compile_sweep.launch_attention(SMOLLM2, torch.bfloat16, torch.bfloat16)
    missing = launched_kernels() - {each.kernel for each in compiler.found}
    assert missing == (set() if thin_linear.tiles_on(card) else {"_product"})
    assert compile_sweep.faults(card, compiler.found) == []


# the tightest tile of each card, and every tile and KV dtype on one
@pytest.mark.parametrize(
    ("card", "layer", "kind"),
    [
        pytest.param(A100, GLOBAL, "bf16", id="A100, 512"),
        pytest.param(A40, SLIDING, "fp8 KV", id="A40, 256, fp8"),
        pytest.param(RTX_4090, GLOBAL, "fp8 KV", id="4090, 512, fp8"),
        pytest.param(RTX_4090, QWEN3, "bf16", id="4090, 128"),
        pytest.param(H200, SLIDING, "bf16", id="H200, 256"),
        pytest.param(H200, GLOBAL, "bf16", id="H200, 512"),
        pytest.param(H200, GPT_OSS, "bf16", id="H200, 64, sinks"),
        pytest.param(B200, GLOBAL, "bf16", id="B200, 512"),
        pytest.param(RTX_5090, GLOBAL, "bf16", id="5090, 512"),
        pytest.param(RTX_5090, SMOLLM2, "fp32", id="5090, 64, fp32"),
    ],
)
def test_verify_attention_fits(card: Card, layer: Layer, kind: str) -> None:
    """Else a server on such a card ends at its first step."""
    with compiling_for(card) as compiler:
        compiler.label = kind
        # the narrow tiles are Hopper's everywhere
        dtypes = compile_sweep.kv_dtypes(card)[kind]
        compile_sweep.launch_attention(layer, *dtypes, full_blocks=card != H200)
    assert {each.kernel for each in compiler.found} == {"_attend_runs", "_merge_runs"}
    assert compile_sweep.faults(card, compiler.found) == []
    assert compile_sweep.beyond_tiles(card, layer, kind, compiler.found) == []


def test_what_does_not_fit_is_told() -> None:
    """A block of 99 KiB cannot hold what a Hopper tile asks for."""
    needs = Compiled("_attend_runs", "bf16", shared_memory=229_376, registers=255, spilled=528)
    assert compile_sweep.faults(H200, [needs]) == []
    [told] = compile_sweep.faults(RTX_4090, [needs])
    assert told.endswith("101376 bytes of shared memory are the limit")
    [told] = compile_sweep.faults(H200, [replace(needs, spilled=1301)])
    assert told.endswith("1300 bytes spilled are the limit")
    assert compile_sweep.faults(H200, [replace(needs, spilled=1301, label="fp32")]) == []
    tight = replace(needs, shared_memory=230_000)
    assert len(compile_sweep.beyond_tiles(H200, GLOBAL, "bf16", [needs, tight])) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("card", CARDS, ids=str)
def test_every_head_dim_has_a_tile_on_every_card(card: Card, dtype: torch.dtype) -> None:
    assert set(choose_tiles(card, dtype).wide) == {64, 128, 256, 512}


def test_a_card_with_little_shared_memory_has_the_tiles_that_fit() -> None:
    assert set(choose_tiles(Card((7, 5)), torch.bfloat16).wide) == {64}
    assert set(choose_tiles(Card((7, 5)), torch.float32).wide) == {64, 128}
    assert choose_tiles(A100, torch.bfloat16).wide[512].block_n == 32
    assert choose_tiles(A40, torch.bfloat16).wide[512].block_n == 16
    # a card of the future is taken for the least capable of those that are sold
    assert choose_tiles(Card((13, 0)), torch.bfloat16) == choose_tiles(RTX_5090, torch.bfloat16)


def test_hopper_keeps_the_tiles_it_was_tuned_with() -> None:
    """They are measured (benchmarks/results/kernels-h200.md): another choice needs a new run."""
    wide, narrow = choose_tiles(H200, torch.bfloat16)
    splits = {"ctas_per_sm": 2, "min_run": 128}
    expected = {
        64: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3, **splits),
        128: Tile(block_m=64, block_n=64, num_warps=4, num_stages=3, **splits),
        256: Tile(64, 32, num_warps=4, num_stages=2, ctas_per_sm=2, min_run=64),
        512: Tile(128, 32, num_warps=8, num_stages=2, ctas_per_sm=1, min_run=32, dv_parts=2),
    }
    assert {dim: replace(tile, shared_memory=0) for dim, tile in wide.items()} == expected
    assert {dim: replace(tile, shared_memory=0) for dim, tile in narrow.items()} == {
        256: Tile(16, 32, num_warps=4, num_stages=3, ctas_per_sm=4, min_run=64),
        512: Tile(16, 32, num_warps=4, num_stages=2, ctas_per_sm=3, min_run=32),
    }
    fp32, none = choose_tiles(H200, torch.float32)
    assert none == {} and set(fp32) == {64, 128, 256, 512}
    alike = Tile(16, 32, num_warps=4, num_stages=1, ctas_per_sm=2, min_run=64)
    assert {replace(tile, shared_memory=0) for tile in fp32.values()} == {alike}
    assert len(thin_linear.tiles_on(H200)) == 5 and thin_linear.tiles_on(B200) == {}
