"""Verify attention with sinks, a logit of each query head's own, against the torch twin."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sglang_dflash.kernels.attention import reference
from tests.kernels.interpreter import INTERPRETED, hold_in_the_interpreter, runs_kernel
from tests.kernels.test_verify_attention import (
    Case,
    assert_matches_twin,
    assert_rows_close,
    build,
    make_problem,
)

with_sinks = partial(Case, sinks=True)
CASES = {
    "mixed lengths, some empty": with_sinks(lens=(0, 130, 7, 290)),
    "window": with_sinks(window=24, lens=(100, 24, 23, 3, 0)),
    "window and runs": with_sinks(window=200, lens=(290, 10), rows=16),
    "window shorter than the block": with_sinks(window=3, rows=8, lens=(40, 2)),
    "logit cap": with_sinks(cap=2.0),
    "group 8, bf16": with_sinks(dtype=torch.bfloat16, heads=16, kv_heads=2, rows=8, lens=(130, 7)),
    "fp8 cache, window": with_sinks(
        dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, window=48, lens=(130, 7)
    ),
    "widths": with_sinks(lens=(300, 9, 200, 150), widths=(16, 2, 8, 9), rows=16, padding=5),
    "few rows beside full blocks in a large batch": with_sinks(
        lens=(3, 40, 0, 9) * 13,
        widths=(2, 16, 1, 9) * 13,
        rows=16,
        heads=2,
        kv_heads=1,
    ),
    "value dim in parts": with_sinks(d=512, dv=512, heads=8, kv_heads=1, rows=16, lens=(70,)),
}


@runs_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_matches_its_twin(case: Case) -> None:
    """Without its sink a head of gpt-oss attends to a few tokens as strongly as to many."""
    assert_matches_twin(build(case), make_problem(case))


@runs_kernel
def test_a_sink_counts_once_however_the_prefixes_are_cut() -> None:
    """Counted by every run, a sink larger than all keys would shrink the output by their number;
    larger sinks than gpt-oss has make up the whole denominator."""
    case = with_sinks(lens=(700, 0, 30), heads=2, kv_heads=1, rows=2)
    for num_sms in (1, 2, 5, 64):
        problem = make_problem(case)
        problem.tensors["sinks"].fill_(40.0)
        attention = build(case, num_sms=num_sms)
        assert_matches_twin(attention, problem)
        assert (attention.plan[0, 1] > 1) == (num_sms > 1)


@runs_kernel
def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    case = with_sinks()
    problem = make_problem(case)
    problem.tensors["sinks"].fill_(float("-inf"))
    build(case).run(**problem.tensors, **problem.options)
    expected = torch.empty_like(problem.tensors["out"])
    without = {k: v for k, v in problem.tensors.items() if k != "sinks"}
    reference.verify_attention(**without | {"out": expected}, **problem.options)
    assert_rows_close(problem.tensors["out"], expected)


if not INTERPRETED:

    def test_every_case_holds_in_the_interpreter() -> None:
        hold_in_the_interpreter(__file__)
