"""The verify attention kernel against its torch twin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from sglang_dflash.kernels.attention import reference
from tests.kernels.interpreter import DEVICE, INTERPRETED, hold_in_the_interpreter, runs_kernel

if INTERPRETED or torch.cuda.is_available():
    from sglang_dflash.kernels.attention.tiles import (
        LayerShape,
        Tile,
        Tiles,
        can_serve,
        choose_tiles,
    )
    from sglang_dflash.kernels.attention.verify import VerifyAttention
    from sglang_dflash.kernels.cards import Card

# enough that a handful of keys is split into several runs
NUM_SMS = 8
# error of an output row relative to its norm, so that long prefixes, whose outputs average out to
# small values, are held to the same standard: one extra key in 9000 moves a row by 1.5e-2
TOLERANCES = {
    torch.float32: 2e-5,  # 24 bits; the summation order differs from the twin's
    torch.bfloat16: 1e-2,  # weights and output rounded to 8 bits
    torch.float16: 2e-3,  # likewise to 11 bits
}


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...] = (37, 5)
    rows: int = 4  # rows of a full block
    widths: tuple[int, ...] | None = None  # rows of each request; full blocks if None
    padding: int = 0  # rows after the last request's
    heads: int = 4
    kv_heads: int = 2
    d: int = 64
    dv: int = 64
    window: int = -1
    cap: float = 0.0
    sinks: bool = False
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
    "group of 6": Case(heads=12, rows=16),
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
    "widths of their own": Case(lens=(37, 5, 0, 130), widths=(1, 4, 2, 3), padding=3),
    "one row each": Case(lens=(9, 300, 0, 40), widths=(1, 1, 1, 1)),
    "requests without rows": Case(lens=(9, 300, 0, 40), widths=(0, 2, 4, 0), padding=2),
    "many narrow requests": Case(
        lens=tuple(range(0, 160, 5)), widths=(1, 2) * 16, rows=16, heads=2, kv_heads=1
    ),
    "few rows beside full blocks": Case(
        lens=(300, 9, 200, 150), widths=(16, 2, 8, 9), rows=16, padding=5
    ),
    "few rows beside full blocks in a large batch": Case(
        lens=(3, 40, 0, 9) * 13, widths=(2, 16, 1, 9) * 13, rows=16, heads=2, kv_heads=1
    ),
    "widths, group 8, window": Case(
        heads=16, kv_heads=2, rows=16, lens=(70, 3, 200), widths=(5, 16, 1), window=48, padding=10
    ),
    "bf16, widths, head dim 512": Case(
        dtype=torch.bfloat16,
        d=512,
        dv=512,
        heads=8,
        kv_heads=1,
        rows=16,
        lens=(70, 9),
        widths=(3, 8),
    ),
    "fp8 cache": Case(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn),
}


@dataclass(frozen=True)
class Problem:
    tensors: dict[str, torch.Tensor]
    options: dict[str, float]


def make_problem(case: Case, seed: int = 0) -> Problem:
    """Draw inputs; every slot that no request owns is NaN, and so is the output."""
    draw = torch.Generator().manual_seed(seed)
    widths = case.widths or (case.rows,) * len(case.lens)
    total, tokens = sum(case.lens), sum(widths) + case.padding
    num_slots = 2 * total + 8 + tokens
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
        "row_indptr": torch.tensor([0, *widths]).cumsum(0),
        "kv_indptr": torch.tensor([0, *case.lens]).cumsum(0).to(torch.int32),
        "kv_indices": owned,
    }
    if case.sinks:
        # bf16, as SGLang has them; about as large as the log of the sum over a few keys
        tensors["sinks"] = (2 * normal(case.heads) + 1).to(torch.bfloat16)
    options = {"scale": case.d**-0.5, "window_left": case.window, "logit_cap": case.cap}
    if case.cache_dtype:
        options |= {"key_scale": 0.5, "value_scale": 2.0}
    return Problem({name: x.to(DEVICE) for name, x in tensors.items()}, options)


def build(
    case: Case, max_requests: int = 64, num_sms: int = NUM_SMS, card_tiles: Tiles | None = None
) -> VerifyAttention:
    """Build the kernel with scratch full of NaN, to expose reads of unwritten partial results."""
    shape = LayerShape(case.heads, case.kv_heads, case.d, case.dv)
    tiles, narrow_tiles = (None, None) if card_tiles is None else card_tiles
    if INTERPRETED and card_tiles is None:
        tile = Tile(block_m=16, block_n=16, num_warps=4, num_stages=1, ctas_per_sm=1, min_run=16)
        tiles = dict.fromkeys((64, 128, 256), tile) | {512: replace(tile, dv_parts=2)}
        narrow_tiles = dict.fromkeys((64, 256), replace(tile, block_n=32, ctas_per_sm=2))
    attention = VerifyAttention(
        max_requests,
        case.rows,
        shapes=[shape],
        dtype=case.dtype,
        device=DEVICE,
        num_sms=num_sms,
        tiles=tiles,
        narrow_tiles=narrow_tiles,
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
    # padding rows are zero, and must be so exactly
    error = difference / expected.float().norm(dim=-1).clamp(min=1e-20)
    assert (error < TOLERANCES[out.dtype]).all(), (
        f"error {error.max():.2e}, or nan {error.isnan().any()}"
    )


@runs_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_matches_its_twin(case: Case) -> None:
    """A wrong row here is a wrong token in the output: verification decides the tokens."""
    assert_matches_twin(build(case), make_problem(case))


@runs_kernel
def test_however_the_prefixes_are_cut_the_result_is_the_same() -> None:
    """The number of runs depends on the GPU and the batch; the tokens must not."""
    case = Case(lens=(1300, 0, 30), window=1250, heads=2, kv_heads=1, rows=2)
    for num_sms in (1, 2, 5, 64):
        assert_matches_twin(build(case, num_sms=num_sms), make_problem(case))


@runs_kernel
@pytest.mark.parametrize(
    ("widths", "few"),
    [
        ((1, 8, 8, 2), (True, True, True, True)),
        ((1, 9, 8, 2), (False, False, False, False)),
        ((1, 9, 8, 2) * 12, (True, False, True, True) * 12),
        ((1, 9, 8, 0) * 12, (False, False, False, None) * 12),
    ],
    ids=["all few", "a small mix", "a large mix", "a small mix in a large graph"],
)
def test_requests_of_few_rows_have_a_launch_of_their_own_where_it_pays(
    widths: tuple[int, ...], few: tuple[bool | None, ...]
) -> None:
    """Which launch served a request shows in the plan, by the rows that the launch is made for."""
    case = Case(
        lens=(20,) * len(widths), widths=widths, rows=16, heads=4, kv_heads=2, d=256, dv=256
    )
    attention = build(replace(case, dtype=torch.bfloat16))
    assert_matches_twin(attention, make_problem(replace(case, dtype=torch.bfloat16)))
    expected = [-1 if is_few is None else 8 if is_few else 16 for is_few in few]
    assert attention.plan[: len(widths), 2].tolist() == expected


@runs_kernel
def test_leftovers_of_a_longer_batch_do_no_harm() -> None:
    """Scratch and plan are reused across steps and layers."""
    longer, shorter = Case(lens=(200, 90, 5)), Case(lens=(40,))
    attention = build(longer)
    assert_matches_twin(attention, make_problem(longer))
    assert_matches_twin(attention, make_problem(shorter, seed=1))


@runs_kernel
def test_prefix_may_start_at_the_window_or_before_it() -> None:
    """SGLang passes only the window's slots; our own callers may pass all of them."""
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
    """Rows are slices of the fused projection, so their stride is not their width."""
    case = Case()
    problem = make_problem(case)
    for name in ("query", "block_keys", "block_values", "out"):
        x = problem.tensors[name]
        wide = torch.full((x.shape[0], 3, *x.shape[1:]), 7.0, dtype=x.dtype, device=DEVICE)
        wide[:, 1] = x
        problem.tensors[name] = wide[:, 1]
    assert_matches_twin(build(case), problem)
    assert (wide[:, 0] == 7).all() and (wide[:, 2] == 7).all()


@runs_kernel
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(d=80, dv=48, heads=8),
        Case(rows=20, window=9),
        Case(widths=(1, 3), padding=4),
        Case(rows=20, widths=(20, 7), heads=12),
    ],
)
def test_the_blocks_kv_is_written_to_the_cache_on_the_way(case: Case) -> None:
    """This saves a launch per layer; the next step reads the KV written here."""
    case = replace(case, dtype=torch.bfloat16)
    problem = make_problem(case)
    tensors = problem.tensors
    taken = set(tensors["kv_indices"].tolist())
    free = [slot for slot in range(tensors["key_cache"].shape[0]) if slot not in taken]
    rows = tensors["query"].shape[0]
    slots = torch.tensor(free)[torch.randperm(len(free))[:rows]].to(DEVICE)
    caches = ("key_cache", "value_cache")
    before = {name: tensors[name].clone() for name in caches}
    build(case).run(**tensors, **problem.options, slots=slots)
    expected = torch.full_like(tensors["out"], float("nan"), dtype=torch.float32)
    reference.verify_attention(
        **tensors | before | {"out": expected}, **problem.options, slots=slots
    )
    assert_rows_close(tensors["out"], expected)
    for name in caches:
        torch.testing.assert_close(tensors[name], before[name], atol=0, rtol=0, equal_nan=True)


@runs_kernel
def test_a_shape_or_dtype_it_was_not_built_for_does_not_fit() -> None:
    """A wrong True would silently corrupt a conversation."""

    def fits(case: Case, **changes: torch.Tensor) -> bool:
        t = make_problem(case).tensors | changes
        names = ("query", "block_keys", "block_values", "key_cache", "value_cache")
        return attention.fits(*(t[name] for name in names))

    case = Case()
    attention = build(case)
    assert fits(case)
    for other in (replace(case, heads=8), replace(case, d=128), replace(case, dtype=torch.float16)):
        assert not fits(other)
    assert not fits(case, block_keys=make_problem(case).tensors["block_keys"].mT)


@runs_kernel
def test_a_layer_without_a_tile_is_known_before_anything_is_built() -> None:
    """MLA's multi-query head has a head dim of 576; SGLang's kernel has to serve it."""
    tiles = choose_tiles(Card((9, 0)), torch.bfloat16).wide
    assert can_serve(LayerShape(16, 1, 512, 512), tiles)
    assert can_serve(LayerShape(16, 16, 192, 128), tiles)
    assert not can_serve(LayerShape(16, 1, 576, 512), tiles)
    assert not can_serve(LayerShape(6, 4, 128, 128), tiles)
    with pytest.raises(AssertionError, match="no tile"):
        build(Case(d=1024, dv=1024))


@runs_kernel
def test_scratch_is_enough_and_is_not_overrun() -> None:
    """Scratch is sized by a bound on runs, not by the batch: unsplit requests must not use it."""
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

    def test_every_case_holds_in_the_interpreter() -> None:
        hold_in_the_interpreter(__file__)
