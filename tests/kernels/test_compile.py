"""Every kernel compiles for its target GPUs, which takes no GPU.

The interpreter checks what a kernel computes, but also runs code that Triton cannot compile.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from benchmarks import op_cases, op_inputs
from sglang_dflash import kernels
from sglang_dflash.kernels import Noise, pdl, triton_ops
from sglang_dflash.kernels.attention.tiles import LayerShape
from sglang_dflash.kernels.attention.verify import VerifyAttention
from sglang_dflash.kernels.gemma_layer import thin_linear
from tests.kernels.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

BLOCK, REQUESTS = 16, 3
# real head shapes, but small GEMMs, which run on the host
SIZES = op_inputs.Sizes(hidden=512, mlp=1024, vocabulary=5000, context=64, weight_copies=1)


@pytest.fixture(params=[80, 90], ids=["A100", "H100 and H200"])
def capability(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def compiled(capability: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Compile every launched kernel instead of running it; the set holds their names."""
    target = GPUTarget("cuda", capability, 32)
    found: set[str] = set()

    def compile_instead(
        self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any
    ) -> None:
        del grid, warmup
        given = dict(zip(self.arg_names, args, strict=False))
        given |= {name: named.pop(name) for name in list(named) if name in self.arg_names}
        signature, constants = {}, {}
        for i, param in enumerate(self.params):
            value = given.get(param.name, param.default)
            if param.is_constexpr or value is None:
                signature[param.name], constants[(i,)] = "constexpr", value
            else:
                signature[param.name] = mangle_type(value)
        triton.compile(ASTSource(self, signature, constants), target=target, options=named)
        found.add(self.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_instead)
    options = {"PDL": True, "launch_pdl": True} if capability >= 90 else {"PDL": False}
    monkeypatch.setattr(pdl, "launch_options", lambda _device: options)
    return found


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


def test_every_kernel_compiles(compiled: set[str], capability: int) -> None:
    for case in op_cases.cases(REQUESTS, triton_ops(), SIZES, torch.bfloat16, "cpu"):
        case.ours(0)
    launch_products()
    launch_shared_rows()
    launch_attention(torch.bfloat16, torch.bfloat16)
    if capability >= 90:
        # an A100 has no fp8
        launch_attention(torch.bfloat16, torch.float8_e4m3fn)
    assert compiled == launched_kernels()


def launch_products() -> None:
    for (width, depth), tile in thin_linear.TILES.items():
        x = torch.empty(BLOCK, depth, dtype=torch.bfloat16, device="meta")
        thin_linear.multiply(x, x.new_empty(width, depth), tile)


def launch_shared_rows() -> None:
    """The ops of a step whose requests share rows."""
    ops, rows, drafts = triton_ops(), 2 * REQUESTS, BLOCK - 1
    logits = torch.empty(rows, SIZES.vocabulary, dtype=torch.bfloat16, device="meta")
    draft_logits = logits.new_empty(REQUESTS, drafts, SIZES.vocabulary)
    ops.peak_probabilities(logits, 30.0)
    confidence = torch.empty(REQUESTS, drafts, device="meta")
    bounds = ops.share_rows(confidence, confidence[0], confidence[0], rows)
    block = bounds.new_empty(REQUESTS, BLOCK)
    row, lens = bounds.new_empty(rows), bounds[1:]
    outputs = {"out_token_ids": row, "out_positions": row, "out_slots": row, "requests": row}
    ops.pack_rows(bounds, block, block, block, **outputs)
    noise = Noise(block, confidence[:, 0])
    asked = (logits, draft_logits, block[:, 1:], block[:, 1:], noise, confidence)
    shared = {"bounds": bounds, "requests": row}
    _, num_correct, _ = ops.reject_by_block(*asked, is_sampled=lens > 0, logit_cap=30.0, **shared)
    for told in (None, num_correct):
        ops.accept_block(row, row, lens, row, told, bounds, BLOCK)


def launch_attention(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Gemma 4's two kinds of layer."""
    shapes = [LayerShape(32, 16, 256, 256), LayerShape(32, 4, 512, 512)]
    attention = VerifyAttention(
        REQUESTS, BLOCK, shapes=shapes, dtype=dtype, device="meta", num_sms=132
    )
    for shape, window in zip(shapes, (1024, -1), strict=True):
        rows = REQUESTS * BLOCK
        query = torch.empty(rows, shape.num_q_heads, shape.head_dim, dtype=dtype, device="meta")
        keys = query.new_empty(rows, shape.num_kv_heads, shape.head_dim)
        cache = keys.new_empty(keys.shape, dtype=cache_dtype)
        bounds = keys.new_empty(REQUESTS + 1, dtype=torch.int32)
        slots = keys.new_empty(rows, dtype=torch.int64)
        row_bounds = bounds.long()
        attention.run(
            *(query, keys, keys, torch.empty_like(query), cache, cache, row_bounds, bounds, slots),
            scale=1.0,
            window_left=window,
            slots=slots,
        )
