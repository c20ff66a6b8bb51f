"""Verify attention on a GPU: served shapes on all SMs, and in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from sglang_dflash.kernels.attention import reference
from tests.kernels.test_verify_attention import (
    Case,
    assert_matches_twin,
    assert_rows_close,
    build,
    make_problem,
)

GPT_OSS = partial(Case, heads=64, kv_heads=8, d=64, dv=64, sinks=True)
SERVED = {
    "gemma-4-31b, window": Case(heads=32, kv_heads=16, d=256, dv=256, window=1023),
    "gemma-4-31b, full": Case(heads=32, kv_heads=4, d=512, dv=512),
    "qwen3-8b": Case(heads=32, kv_heads=8, d=128, dv=128),
    "head dim 64": Case(heads=16, kv_heads=2, d=64, dv=64),
    "gpt-oss, window": GPT_OSS(window=127),
    "gpt-oss, full": GPT_OSS(),
    "gpt-oss, full, fp8 cache": GPT_OSS(cache_dtype=torch.float8_e4m3fn),
}
WIDTHS = {"full blocks": (16,), "one row": (1,), "mixed": (1, 16, 4, 0, 7)}
LENS = {
    "1 request": (5000,),
    "8 requests": (0, 1, 511, 512, 513, 1023, 1024, 9000),
    "300 requests": tuple(range(0, 600, 2)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED.keys())
def test_shapes_that_are_served_match_on_the_whole_card(
    case: Case, lens: tuple[int, ...], widths: tuple[int, ...]
) -> None:
    """The committed tiles on all SMs, which the interpreter cannot cover."""
    repeated = (widths * len(lens))[: len(lens)]
    case = replace(case, lens=lens, rows=16, widths=repeated, padding=9, dtype=torch.bfloat16)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    attention = build(case, max_requests=512, num_sms=num_sms)
    assert_matches_twin(attention, make_problem(case))


@pytest.mark.gpu
def test_a_captured_call_follows_lengths_it_was_not_captured_with() -> None:
    """A graph is captured with dummy lengths and replayed with real ones, padding included."""
    case = Case(lens=(1, 1, 1, 1), rows=8, sinks=True)
    attention = build(case)
    real = make_problem(replace(case, lens=(190, 0, 33, 77), widths=(1, 8, 0, 5), padding=2))
    static = {name: x.clone() for name, x in real.tensors.items()}
    static["kv_indptr"].copy_(torch.arange(5))
    static["row_indptr"].copy_(torch.arange(5) * 4)
    attention.run(**static, **real.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(**static, **real.options)
    for name in ("kv_indptr", "row_indptr"):
        static[name].copy_(real.tensors[name])
    graph.replay()
    expected = torch.empty_like(static["out"])
    reference.verify_attention(**real.tensors | {"out": expected}, **real.options)
    assert_rows_close(static["out"], expected)
