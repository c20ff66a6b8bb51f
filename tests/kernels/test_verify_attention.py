"""The verify kernel against its twin: compiled where there is a GPU, interpreted everywhere.

Triton reads TRITON_INTERPRET when it is first imported, so interpreting needs a process of its own:
`test_every_case_holds_in_the_interpreter` runs this file again with the variable set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sglang_dflash.kernels import reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def runs_kernel(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that launches: without the interpreter it needs a GPU."""
    return test if INTERPRETED else pytest.mark.gpu(test)


if INTERPRETED:
    import numpy as np
    from triton.runtime import interpreter

    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, *rest):  # type: ignore[no-untyped-def]
        """Widen bf16, which the interpreter keeps as bits and would multiply as integers."""
        wide = [
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        ]
        return plain_dot(self, *wide, *rest)

    interpreter.InterpreterBuilder.create_dot = dot

if INTERPRETED or torch.cuda.is_available():
    import triton.language as tl

    from sglang_dflash.kernels.verify_attention import LayerShape, Tile, VerifyAttention

# few enough that a handful of keys is cut into several runs
NUM_SMS = 8
# error of an output row over its norm, so that long prefixes, whose outputs average out to little,
# are held to as much as short ones: one key too many of 9000 moves a row by 1.5e-2
TOLERANCES = {
    torch.float32: 2e-5,  # 24 bits, summed in another order than the twin's
    torch.bfloat16: 1e-2,  # weights and output rounded to 8 bits
    torch.float16: 2e-3,  # and to 11
}


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...] = (37, 5)
    rows: int = 4
    heads: int = 4
    kv_heads: int = 2
    d: int = 64
    dv: int = 64
    window: int = -1
    cap: float = 0.0
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None


CASES = {
    "one request": Case(lens=(50,)),
    "no prefix": Case(lens=(0,)),
    "one key": Case(lens=(1,)),
    "mixed lengths, some empty": Case(lens=(0, 130, 7, 0, 64, 33)),
    "prefix of whole tiles": Case(lens=(128, 64)),
    "long beside short": Case(lens=(3, 290, 3)),
    "more requests than a vector of 16": Case(lens=(9,) * 18, heads=2, kv_heads=1),
    "head dim 128, group 4": Case(d=128, dv=128, heads=8),
    "head dim 256, group 2": Case(d=256, dv=256),
    "head dim 512, group 8": Case(d=512, dv=512, heads=8, kv_heads=1, rows=16, lens=(70,)),
    "odd head dims": Case(d=80, dv=48),
    "values wider than keys": Case(d=64, dv=128),
    "one query head per kv head": Case(heads=2),
    "group of 3": Case(heads=6, rows=5),
    "block of 2": Case(rows=2),
    "block of 7": Case(rows=7),
    "block of 32": Case(rows=32, lens=(40, 0)),
    "window cuts the prefix": Case(window=24, lens=(100, 24, 23, 3, 0)),
    "window shorter than the block": Case(window=3, rows=8, lens=(40, 2)),
    "window longer than everything": Case(window=1000),
    "window and runs": Case(window=200, lens=(290, 10), rows=16),
    "logit cap": Case(cap=2.0),
    "logit cap and window": Case(cap=5.0, window=20),
    "bf16": Case(dtype=torch.bfloat16, lens=(130, 7)),
    "bf16, head dim 256, window": Case(dtype=torch.bfloat16, d=256, dv=256, rows=16, window=48),
    "fp16": Case(dtype=torch.float16),
    "fp8 cache": Case(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn),
}


@dataclass(frozen=True)
class Problem:
    tensors: dict[str, torch.Tensor]
    options: dict[str, float]


def make_problem(case: Case, seed: int = 0) -> Problem:
    """Draw inputs; every slot that no request owns holds NaN, and so does the output."""
    draw = torch.Generator().manual_seed(seed)
    total, tokens = sum(case.lens), len(case.lens) * case.rows
    num_slots = 2 * total + 8
    owned = torch.randperm(num_slots, generator=draw)[:total]
    cache_dtype = case.cache_dtype or case.dtype

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    def cache(dim: int) -> torch.Tensor:
        pool = torch.full((num_slots, case.kv_heads, dim), float("nan"))
        pool[owned] = normal(total, case.kv_heads, dim)
        return pool.to(cache_dtype)

    tensors = {
        "query": normal(tokens, case.heads, case.d).to(case.dtype),
        "block_keys": normal(tokens, case.kv_heads, case.d).to(case.dtype),
        "block_values": normal(tokens, case.kv_heads, case.dv).to(case.dtype),
        "out": torch.full((tokens, case.heads, case.dv), float("nan"), dtype=case.dtype),
        "key_cache": cache(case.d),
        "value_cache": cache(case.dv),
        "kv_indptr": torch.tensor([0, *case.lens]).cumsum(0).to(torch.int32),
        "kv_indices": owned,
    }
    options = {"scale": case.d**-0.5, "window_left": case.window, "logit_cap": case.cap}
    if case.cache_dtype:
        options |= {"key_scale": 0.5, "value_scale": 2.0}
    return Problem({name: x.to(DEVICE) for name, x in tensors.items()}, options)


def build(case: Case, max_requests: int = 32, num_sms: int = NUM_SMS) -> VerifyAttention:
    """Build the kernel with scratch full of NaN: a partial result read but not written shows."""
    shape = LayerShape(case.heads, case.kv_heads, case.d, case.dv)
    tiles = None
    if INTERPRETED:
        tile = Tile(block_m=16, block_n=16, num_warps=4, num_stages=1, ctas_per_sm=1, min_run=16)
        tiles = dict.fromkeys((64, 128, 256, 512), tile)
    attention = VerifyAttention(
        max_requests,
        case.rows,
        shapes=[shape],
        dtype=case.dtype,
        device=DEVICE,
        num_sms=num_sms,
        tiles=tiles,
    )
    for scratch in (attention.partial_out, attention.partial_lse):
        scratch.fill_(float("nan"))
    attention.plan.fill_(-1)
    return attention


def assert_matches_twin(attention: VerifyAttention, problem: Problem) -> None:
    expected = torch.full_like(problem.tensors["out"], float("nan"), dtype=torch.float32)
    reference.verify_attention(**problem.tensors | {"out": expected}, **problem.options)
    attention.run(**problem.tensors, **problem.options)
    assert_rows_close(problem.tensors["out"], expected)


def assert_rows_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (out.float() - expected.float()).norm(dim=-1)
    error = difference / expected.float().norm(dim=-1)
    assert (error < TOLERANCES[out.dtype]).all(), (
        f"error {error.max():.2e}, or nan {error.isnan().any()}"
    )


@runs_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_matches_its_twin(case: Case) -> None:
    """A wrong row here is a wrong token there: verification is where tokens are decided."""
    assert_matches_twin(build(case), make_problem(case))


@runs_kernel
def test_however_the_prefixes_are_cut_the_result_is_the_same() -> None:
    """The number of runs follows the card and the batch; the tokens may not."""
    case = Case(lens=(1300, 0, 30), window=1250, heads=2, kv_heads=1, rows=2)
    for num_sms in (1, 2, 5, 64):
        assert_matches_twin(build(case, num_sms=num_sms), make_problem(case))


@runs_kernel
def test_leftovers_of_a_longer_batch_do_no_harm() -> None:
    """Scratch and plan are reused from step to step and layer to layer."""
    longer, shorter = Case(lens=(200, 90, 5)), Case(lens=(40,))
    attention = build(longer)
    assert_matches_twin(attention, make_problem(longer))
    assert_matches_twin(attention, make_problem(shorter, seed=1))


@runs_kernel
def test_prefix_may_start_at_the_window_or_before_it() -> None:
    """SGLang hands over the window's slots only, our own callers may hand over all of them."""
    case = Case(lens=(90,), window=30, rows=6)
    problem = make_problem(case)
    assert_matches_twin(build(case), problem)
    whole = problem.tensors["out"].clone()
    problem.tensors["kv_indices"] = problem.tensors["kv_indices"][-case.window :]
    problem.tensors["kv_indptr"] = torch.tensor([0, 30], dtype=torch.int32, device=DEVICE)
    assert_matches_twin(build(case), problem)
    assert_rows_close(problem.tensors["out"], whole)


@runs_kernel
def test_rows_of_a_wider_tensor_are_read_and_written_in_place() -> None:
    """Query rows come as a slice of the fused projection, so their stride is not their width."""
    case = Case()
    problem = make_problem(case)
    for name in ("query", "out"):
        x = problem.tensors[name]
        wide = torch.full((x.shape[0], 3, *x.shape[1:]), 7.0, dtype=x.dtype, device=DEVICE)
        wide[:, 1] = x
        problem.tensors[name] = wide[:, 1]
    assert_matches_twin(build(case), problem)
    assert (wide[:, 0] == 7).all() and (wide[:, 2] == 7).all()


def call_as_sglang(
    attention: VerifyAttention, case: Case, problem: Problem, **changes: object
) -> bool:
    """Call with the arguments of SGLang's TritonAttnBackend."""
    t = problem.tensors
    n = len(case.lens)
    positional = {
        "q": t["query"],
        "k": t["block_keys"],
        "v": t["block_values"],
        "o": t["out"],
        "k_buffer": t["key_cache"],
        "v_buffer": t["value_cache"],
        "qo_indptr": torch.arange(n + 1, device=DEVICE, dtype=torch.int32) * case.rows,
        "kv_indptr": t["kv_indptr"],
        "kv_indices": t["kv_indices"],
        "custom_mask": None,
        "is_causal": True,
        "mask_indptr": None,
        "max_len_extend": case.rows,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "sm_scale": problem.options["scale"],
    }
    keywords = {
        "logit_cap": case.cap,
        "sliding_window_size": case.window,
        "sinks": None,
        "window_kv_offsets": torch.zeros(n, dtype=torch.int32, device=DEVICE),
        "xai_temperature_len": -1,
        "max_bs": 4096,
    }
    for name, value in changes.items():
        (positional if name in positional else keywords)[name] = value
    return attention(*positional.values(), **keywords)


@runs_kernel
def test_sglangs_call_is_served() -> None:
    case = Case(window=20, cap=3.0)
    problem = make_problem(case)
    expected = torch.empty_like(problem.tensors["out"])
    reference.verify_attention(**problem.tensors | {"out": expected}, **problem.options)
    assert call_as_sglang(build(case), case, problem) is True
    assert_rows_close(problem.tensors["out"], expected)


@runs_kernel
@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("custom_mask", torch.ones(1), id="tree mask"),
        pytest.param("is_causal", False, id="not causal"),
        pytest.param("sinks", torch.ones(4), id="sinks"),
        pytest.param("xai_temperature_len", 1024, id="xai temperature"),
        pytest.param("max_len_extend", 3, id="ragged blocks"),
    ],
)
def test_what_it_cannot_compute_is_declined_untouched(name: str, value: object) -> None:
    """True with the wrong numbers would corrupt a conversation without a trace."""
    case = Case()
    problem = make_problem(case)
    assert call_as_sglang(build(case), case, problem, **{name: value}) is False
    assert problem.tensors["out"].isnan().all()


@runs_kernel
def test_a_shape_or_dtype_it_was_not_built_for_is_declined() -> None:
    case = Case()
    attention = build(case)
    for other in (replace(case, heads=8), replace(case, d=128), replace(case, dtype=torch.float16)):
        assert call_as_sglang(attention, other, make_problem(other)) is False


@runs_kernel
def test_head_dims_beyond_the_table_are_refused_at_start_up() -> None:
    with pytest.raises(ValueError, match="head dims up to 512"):
        build(Case(d=1024, dv=1024))


@runs_kernel
def test_scratch_is_enough_and_is_not_overrun() -> None:
    """Scratch is sized by a bound on runs, not by the batch: many whole requests may not use it."""
    case = Case(lens=(1,) * 12 + (300, 1, 250))
    attention = build(case)
    guarded = {}
    for name in ("partial_out", "partial_lse"):
        size = getattr(attention, name).shape[0]
        guarded[name] = torch.full((4 * size,), float("nan"), device=DEVICE)
        setattr(attention, name, guarded[name][:size])
    assert_matches_twin(attention, make_problem(case))
    for name, memory in guarded.items():
        scratch, beyond = memory.tensor_split([memory.shape[0] // 4])
        assert not scratch.isnan().all(), f"no request was cut: {name} is unused"
        assert beyond.isnan().all()


@runs_kernel
def test_scratch_does_not_grow_with_the_number_of_requests() -> None:
    """Hundreds of requests of a large model would otherwise cost gigabytes."""
    few, many = build(Case(), max_requests=1), build(Case(), max_requests=4096)
    assert few.partial_out.shape == many.partial_out.shape


if not INTERPRETED:

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
    def test_every_case_holds_in_the_interpreter() -> None:
        """CI has no GPU; this is its only look at the kernel."""
        environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        root = Path(__file__).parents[2]
        run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-8000:]
        assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout[-2000:]

    SERVED = {
        "gemma-4-31b, window": Case(heads=32, kv_heads=16, d=256, dv=256, window=1023),
        "gemma-4-31b, full": Case(heads=32, kv_heads=4, d=512, dv=512),
        "qwen3-8b": Case(heads=32, kv_heads=8, d=128, dv=128),
        "head dim 64": Case(heads=16, kv_heads=2, d=64, dv=64),
    }
    LENS = {
        "1 request": (5000,),
        "8 requests": (0, 1, 511, 512, 513, 1023, 1024, 9000),
        "300 requests": tuple(range(0, 600, 2)),
    }

    @pytest.mark.gpu
    @pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
    @pytest.mark.parametrize("case", SERVED.values(), ids=SERVED.keys())
    def test_shapes_that_are_served_match_on_the_whole_card(
        case: Case, lens: tuple[int, ...]
    ) -> None:
        """The committed tiles, on every multiprocessor: what the interpreter cannot see."""
        case = replace(case, lens=lens, rows=16, dtype=torch.bfloat16)
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        attention = build(case, max_requests=512, num_sms=num_sms)
        assert_matches_twin(attention, make_problem(case))

    @pytest.mark.gpu
    def test_a_captured_call_follows_lengths_it_was_not_captured_with() -> None:
        """A graph is captured with dummy lengths and replayed with real ones, padding included."""
        case = Case(lens=(1, 1, 1, 1), rows=8)
        attention = build(case)
        real = make_problem(replace(case, lens=(190, 0, 33, 77)))
        static = {name: x.clone() for name, x in real.tensors.items()}
        static["kv_indptr"].copy_(torch.arange(5))
        attention.run(**static, **real.options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attention.run(**static, **real.options)
        static["kv_indptr"].copy_(real.tensors["kv_indptr"])
        graph.replay()
        expected = torch.empty_like(static["out"])
        reference.verify_attention(**real.tensors | {"out": expected}, **real.options)
        assert_rows_close(static["out"], expected)
