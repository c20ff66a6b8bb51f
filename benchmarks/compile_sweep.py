"""Compile the kernels of a step for every card and every released target, and check that they fit.

    python -m benchmarks.compile_sweep                     # every card, an hour of one core
    python -m benchmarks.compile_sweep --cards 8.9,12.0

Needs no GPU: Triton compiles for any card. A kernel fits if it asks for no more shared memory than
a block can have, verify attention for no more than its tile says, and if few registers are spilled.
Exits with 1 if one does not. `tests/kernels/test_compile.py` does the same for a part of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks import op_cases, op_inputs
from benchmarks.kernels import Layer
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.kernels import Noise, cards, pdl, triton_ops
from sglang_dflash.kernels.attention.tiles import LayerShape, choose_tiles, tile_dim
from sglang_dflash.kernels.attention.verify import VerifyAttention
from sglang_dflash.kernels.cards import Card
from sglang_dflash.kernels.gemma_layer import thin_linear
from sglang_dflash.testing.progress import Progress, say

CARDS = tuple(Card(each) for each in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)))
BLOCK, REQUESTS = 16, 3
# bytes per thread. What is spilled around the loop over keys costs little: on an H200, where verify
# attention was measured, up to 736 bytes are. fp32 is for precision and uses no tensor cores
MAX_SPILLED = 1300
MAX_SPILLED_FP32 = 4500


LAYERS = (
    Layer("gemma-4-31b, sliding", LayerShape(32, 16, 256, 256), window=1023),
    Layer("gemma-4-31b, global", LayerShape(32, 4, 512, 512)),
    Layer("gemma-4-26b-a4b, sliding", LayerShape(16, 8, 256, 256), window=1023),
    Layer("gemma-4-26b-a4b, global", LayerShape(16, 2, 512, 512)),
    Layer("qwen3-4b, qwen3-8b, llama-3.1-8b", LayerShape(32, 8, 128, 128)),
    Layer("qwen3-coder-30b-a3b", LayerShape(32, 4, 128, 128)),
    Layer("qwen2.5-7b", LayerShape(28, 4, 128, 128)),
    Layer("qwen2.5-0.5b", LayerShape(14, 2, 64, 64)),
    Layer("smollm2-135m", LayerShape(9, 3, 64, 64)),
    Layer("gpt-oss, sliding", LayerShape(64, 8, 64, 64), window=127, sinks=True),
    Layer("gpt-oss, full", LayerShape(64, 8, 64, 64), sinks=True),
    Layer("qwen3.5-35b-a3b, full", LayerShape(16, 2, 256, 256)),
    Layer("qwen3.5-27b, full", LayerShape(24, 4, 256, 256)),
)


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes of a card."""

    kernel: str
    label: str
    shared_memory: int
    registers: int
    spilled: int  # bytes per thread


class NoDriver:
    """Stands for the GPU of a card: names the target, runs nothing."""

    def __init__(self, card: Card) -> None:
        major, minor = card.capability
        self._number = 10 * major + minor

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._number, 32)


class Compiler:
    """Collects the kernels that are launched while it is in use, compiled for one card."""

    def __init__(self) -> None:
        self.label = ""
        self.found: list[Compiled] = []
        self._seen: set[str] = set()

    def take(self, name: str, kernel: Any) -> None:
        if kernel.hash not in self._seen:
            self._seen.add(kernel.hash)
            registers, spilled = read_usage(kernel.asm["cubin"])
            shared = kernel.metadata.shared
            self.found.append(Compiled(name, self.label, shared, registers, spilled))


@contextmanager
def compiling_for(card: Card) -> Iterator[Compiler]:
    """Compile every launched kernel for a card instead of running it."""
    compiler, launch = Compiler(), JITFunction.run

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        del warmup
        compiler.take(kernel.fn.__name__, launch(kernel, *args, grid=grid, warmup=True, **named))

    with (
        mock.patch.object(driver, "_active", NoDriver(card)),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(cards, "current", lambda: card),
        mock.patch.object(pdl, "launch_options", lambda _device: pdl.options_on(card)),
    ):
        yield compiler


def read_usage(cubin: bytes) -> tuple[int, int]:
    """Return a kernel's registers and its bytes of stack, which is where registers are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])


def kv_dtypes(card: Card) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes of model and KV cache."""
    fp8 = torch.float8_e4m3fn if card.has_e4m3 else torch.float8_e5m2
    return {
        "bf16": (torch.bfloat16, torch.bfloat16),
        "fp8 KV": (torch.bfloat16, fp8),
        "fp32": (torch.float32, torch.float32),
    }


def launch_attention(
    layer: Layer, dtype: torch.dtype, cache_dtype: torch.dtype, *, full_blocks: bool = False
) -> None:
    """Launch verify attention as a server does, also for requests of few rows unless all blocks
    are full."""
    shape, rows = layer.shape, REQUESTS * BLOCK
    attention = VerifyAttention(
        REQUESTS,
        BLOCK,
        shapes=[shape],
        dtype=dtype,
        device="meta",
        num_sms=132,
        narrow_tiles={} if full_blocks else None,
    )
    query = torch.empty(rows, shape.num_q_heads, shape.head_dim, dtype=dtype, device="meta")
    keys = query.new_empty(rows, shape.num_kv_heads, shape.head_dim)
    values = query.new_empty(rows, shape.num_kv_heads, shape.v_head_dim)
    out = query.new_empty(rows, shape.num_q_heads, shape.v_head_dim)
    bounds = keys.new_empty(REQUESTS + 1, dtype=torch.int32)
    slots = keys.new_empty(rows, dtype=torch.int64)
    caches = (keys.to(cache_dtype), values.to(cache_dtype))
    attention.run(
        *(query, keys, values, out, *caches, bounds.long(), bounds, slots),
        scale=1.0,
        window_left=layer.window,
        # SGLang writes a quantised cache
        slots=slots if cache_dtype == dtype else None,
        sinks=query.new_empty(shape.num_q_heads) if layer.sinks else None,
    )


def launch_ops(dtype: torch.dtype) -> None:
    """Launch every other op: with real head shapes, but small GEMMs, which run on the host."""
    sizes = op_inputs.Sizes(hidden=512, mlp=1024, vocabulary=5000, context=64, weight_copies=1)
    for case in op_cases.cases(REQUESTS, triton_ops(), sizes, dtype, "cpu"):
        case.ours(0)
    launch_shared_rows(dtype)
    launch_norms(dtype)


def launch_products(card: Card) -> None:
    for (width, depth), tile in thin_linear.tiles_on(card).items():
        x = torch.empty(BLOCK, depth, dtype=torch.bfloat16, device="meta")
        thin_linear.multiply(x, x.new_empty(width, depth), tile)


def launch_norms(dtype: torch.dtype) -> None:
    """The norms of the widest target, of a layer with experts."""
    width = op_inputs.Sizes().hidden
    x = torch.empty(BLOCK, width, dtype=dtype, device="meta")
    weight = x[0]
    triton_ops().norm_add_norm(
        x[None],
        x,
        norm_weight=weight,
        next_weights=(weight,) * 3,
        scale=weight[:1],
        eps=1e-6,
        expert_branch=(x, weight, weight),
    )


def launch_shared_rows(dtype: torch.dtype) -> None:
    """The ops of a step whose requests share rows, at the largest vocabulary."""
    ops, rows, drafts = triton_ops(), 2 * REQUESTS, BLOCK - 1
    vocabulary = op_inputs.Sizes().vocabulary
    logits = torch.empty(rows, vocabulary, dtype=dtype, device="meta")
    draft_logits = logits.new_empty(REQUESTS, drafts, vocabulary)
    ops.peak_probabilities(logits, 30.0)
    confidence = torch.empty(REQUESTS, drafts, device="meta")
    bounds = ops.share_rows(confidence, confidence[0], confidence[0], rows)
    block = bounds.new_empty(REQUESTS, BLOCK)
    row, lens = bounds.new_empty(rows), bounds[1:]
    outputs = {"out_token_ids": row, "out_positions": row, "out_slots": row, "requests": row}
    ops.pack_rows(bounds, block, block, block, **outputs)
    noise = Noise(block, confidence[:, 0])
    # SGLang's logits, where ours cannot be used, are in fp32
    for of_target in (logits, logits.float()):
        _, num_correct, _ = ops.reject_by_block(
            *(of_target, draft_logits, block[:, 1:], block[:, 1:]),
            noise,
            confidence,
            is_sampled=lens > 0,
            logit_cap=30.0,
            bounds=bounds,
            requests=row,
        )
    for told in (None, num_correct):
        ops.accept_block(row, row, lens, row, told, bounds, BLOCK)


def faults(card: Card, found: Iterable[Compiled]) -> list[str]:
    """Return what asks for more than the card, or its tile, has, or spills too much."""
    told = []
    for each in found:
        if each.shared_memory > card.shared_memory:
            told.append(f"{each}: {card.shared_memory} bytes of shared memory are the limit")
        limit = MAX_SPILLED_FP32 if "fp32" in each.label else MAX_SPILLED
        if each.spilled > limit:
            told.append(f"{each}: {limit} bytes spilled are the limit")
    return told


def beyond_tiles(card: Card, layer: Layer, kind: str, found: Iterable[Compiled]) -> list[str]:
    """Return the launches of a layer that take more shared memory than its tiles say."""
    tiles = choose_tiles(card, kv_dtypes(card)[kind][0])
    dim = tile_dim(layer.shape)
    limit = max(each[dim].shared_memory for each in tiles if dim in each)
    return [
        f"{each}: its tile says {limit} bytes of shared memory"
        for each in found
        if each.kernel == "_attend_runs" and each.shared_memory > limit
    ]


def sweep_card(card: Card) -> tuple[list[Compiled], list[str]]:
    """Compile everything for one card; return it, and what does not fit."""
    told = []
    with compiling_for(card) as compiler:
        for kind in ("bf16", "fp32"):
            compiler.label = f"ops, {kind}"
            launch_ops(kv_dtypes(card)[kind][0])
        launch_products(card)
        for layer in LAYERS:
            for kind, dtypes in kv_dtypes(card).items():
                before = len(compiler.found)
                compiler.label = f"{layer.name}, {kind}"
                launch_attention(layer, *dtypes)
                told += beyond_tiles(card, layer, kind, compiler.found[before:])
    return compiler.found, told + faults(card, compiler.found)


HEADER = (
    "| card | kernel | kernels | shared memory, bytes | of | spilled, bytes | in |\n"
    "|---|---|---|---|---|---|---|"
)


def lines(card: Card, found: list[Compiled]) -> list[str]:
    """Return the largest need of each kernel."""
    by_name: dict[str, list[Compiled]] = {}
    for each in found:
        kind = ", fp32" if "fp32" in each.label else ""
        by_name.setdefault(f"{each.kernel}{kind}", []).append(each)
    major, minor = card.capability
    shown = []
    for name, group in sorted(by_name.items()):
        shared = max(each.shared_memory for each in group)
        worst = max(group, key=lambda each: each.spilled)
        shown.append(
            f"| {major}.{minor} | {name} | {len(group)} | {shared} | {card.shared_memory} "
            f"| {worst.spilled} | {worst.label if worst.spilled else ''} |"
        )
    return shown


def parse_options() -> argparse.Namespace:
    def card(text: str) -> Card:
        major, minor = map(int, text.split("."))
        return Card((major, minor))

    parser = parser_of(__doc__)
    parser.add_argument(
        "--cards",
        type=lambda text: [card(each) for each in text.split(",")],
        default=",".join("{}.{}".format(*each.capability) for each in CARDS),
        help="compute capabilities; default: %(default)s",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="cards to compile for at once; default: %(default)s",
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    print(HEADER, flush=True)
    told = []
    with ProcessPoolExecutor(options.processes) as pool, ending_workers():
        # the workers are forked here, before the bar has a thread
        results = pool.map(sweep_card, options.cards)
        with Progress(len(options.cards), "cards") as progress:
            for card, (found, wrong) in zip(options.cards, results, strict=True):
                say("\n".join(lines(card, found)))
                progress.step()
                told += list(zip(repeat(card), wrong, strict=False))
    for card, fault in told:
        print(f"{card}: {fault}")
    raise SystemExit(bool(told))


@contextmanager
def ending_workers() -> Iterator[None]:
    """On Ctrl-C end the worker processes, which would compile for the next card first."""
    try:
        yield
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():
            # not by a signal that the worker handles: it would go on
            worker.kill()
        raise


if __name__ == "__main__":
    sys.exit(end_on_interrupt("compile_sweep", main))
