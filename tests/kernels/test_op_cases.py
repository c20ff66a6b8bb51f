"""The cases that benchmarks/kernels.py times: our op matches its torch twin at small sizes."""

from __future__ import annotations

import torch

from tests.kernels.interpreter import DEVICE, INTERPRETED, hold_in_the_interpreter, runs_kernel

if INTERPRETED or torch.cuda.is_available():
    from benchmarks import op_cases, op_inputs
    from sglang_dflash.kernels import triton_ops


@runs_kernel
def test_every_case_runs_with_our_ops_and_with_the_twins() -> None:
    sizes = op_inputs.Sizes(
        hidden=64,
        mlp=128,
        q_heads=4,
        kv_heads=2,
        head_dim=32,
        vocabulary=300,
        features=2,
        draft_kv_heads=2,
        draft_head_dim=32,
        context=40,
        block_size=4,
    )
    found = set()
    for case in op_cases.cases(3, triton_ops(), sizes, torch.bfloat16, DEVICE):
        found.add(case.op)
        assert case.moved > 0
        for turn in range(2):
            ours = case.ours(turn)
            twin = case.twin and case.twin(turn)
        if isinstance(ours, torch.Tensor) and isinstance(twin, torch.Tensor):
            torch.testing.assert_close(ours.to(twin.dtype), twin, atol=0.1, rtol=0.05)
    # the library serves the GEMMs at these sizes
    assert len(found) == 18


if not INTERPRETED:

    def test_every_kernel_holds_in_the_interpreter() -> None:
        hold_in_the_interpreter(__file__)
