"""The small kernels of a step against their torch twins, bit for bit where nothing is summed."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash.kernels import COUNT_MATCHES, TORCH, Noise, triton_ops
from sglang_dflash.types import Verdict
from tests.kernels.interpreter import DEVICE, INTERPRETED, hold_in_the_interpreter, runs_kernel

if INTERPRETED or torch.cuda.is_available():
    TRITON = triton_ops()
# a batch of so many rows that a program has several blocks of one; the interpreter is slow
MANY, PROGRAMS = (5, 8) if INTERPRETED else (40, 64)
# of draft KV; the interpreter rounds wrongly to fp8: 1.97 to 1
FP8_CACHES = () if INTERPRETED else (torch.float8_e4m3fn, torch.float8_e5m2)
CACHES = (torch.float32, torch.bfloat16, *FP8_CACHES)


def draw(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device=DEVICE)


def assert_same(one: object, two: object) -> None:
    """Assert exactly equal values and dtypes."""
    torch.testing.assert_close(one, two, atol=0, rtol=0)


@runs_kernel
@pytest.mark.parametrize("width", [2, 7, 16, 32])
@pytest.mark.parametrize("requests", [1, 5])
def test_build_block(requests: int, width: int) -> None:
    torch.manual_seed(width)
    table = draw(1000, 9, 100).int()
    anchors, rows = draw(500, requests), draw(9, requests)
    lens = draw(100 - width, requests)
    found = []
    for ops in (TORCH, TRITON):
        out = {name: draw(9, requests, width) for name in ("token_ids", "positions", "slots")}
        ops.build_block(anchors, lens, rows, table, mask_token_id=501, last_position=60, **out)
        found.append(out)
    assert_same(*found)


@runs_kernel
@pytest.mark.parametrize("width", [2, 7, 16, 32])
def test_accept_block(width: int) -> None:
    """Only two token ids, so that every number of correct drafts occurs."""
    torch.manual_seed(width)
    requests = 64 if INTERPRETED else 300
    token_ids, choices = draw(2, requests, width), draw(2, requests, width)
    # some blocks all correct, some wrong from the first draft
    token_ids[:20, 1:] = choices[:20, :-1]
    token_ids[20:30, 1:] = choices[20:30, :-1] + 1
    lens, slots = draw(90, requests), draw(1000, requests, width) + 1
    block = (token_ids, choices, lens, slots)
    one, two = (ops.accept_block(*block) for ops in (TORCH, TRITON))
    assert_same(one, two)
    assert (one[0][:20] == width).all() and (one[0][20:30] == 1).all()
    forced = draw(width, requests).int()
    assert_same(*(ops.accept_block(*block, forced) for ops in (TORCH, TRITON)))
    # every other request has its matches counted, the others a forced number
    forced[::2] = COUNT_MATCHES
    mixed, two = (ops.accept_block(*block, forced) for ops in (TORCH, TRITON))
    assert_same(mixed, two)
    assert_same(mixed[0][::2], one[0][::2])
    assert_same(mixed[0][1::2], forced[1::2] + 1)


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_context_hidden(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    features = torch.randn(5, 3 * 96, device=DEVICE, dtype=dtype)
    weights = {
        "fc_weight": torch.randn(96, 3 * 96, device=DEVICE, dtype=dtype) / 10,
        "norm_weight": torch.randn(96, device=DEVICE, dtype=dtype),
    }
    one, two = (ops.context_hidden(features, **weights, eps=1e-6) for ops in (TORCH, TRITON))
    # 96 squares summed in another order: one ulp
    torch.testing.assert_close(two, one, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 1e-2)


@runs_kernel
@pytest.mark.parametrize("cached", CACHES, ids=str)
@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 64), (8, 128), (3, 40)])
def test_write_context(kv_heads: int, dim: int, cached: torch.dtype) -> None:
    dtype = cached if cached.itemsize > 1 else torch.bfloat16
    torch.manual_seed(dim)
    layers, rows, total = 3, 6, 20
    projected = torch.randn(layers, rows, 2 * kv_heads * dim, device=DEVICE, dtype=dtype)
    positions = draw(50, rows)
    slots = torch.tensor([4, 0, 19, 7, 0, 1], device=DEVICE)  # two rejected, at the scratch slot
    angles = torch.arange(50)[:, None] * 1000.0 ** (-torch.arange(dim // 2) / dim)
    constants = {
        "k_norm_weights": [torch.randn(dim, device=DEVICE, dtype=dtype) for _ in range(layers)],
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE),
        "eps": 1e-6,
    }
    caches = []
    for ops in (TORCH, TRITON):
        keys, values = (
            [torch.full((total, kv_heads, dim), 7.0, device=DEVICE, dtype=cached) for _ in range(3)]
            for _ in range(2)
        )
        ops.write_context(projected, positions, slots, keys, values, **constants)
        caches.append(torch.stack([cache.float() for cache in (*keys, *values)])[:, 1:])
    tolerance = max(1e-5, 2.5 * torch.finfo(cached).eps)
    torch.testing.assert_close(caches[1], caches[0], atol=tolerance, rtol=tolerance)
    untouched = [slot - 1 for slot in range(1, total) if slot not in slots.tolist()]
    assert (caches[1][:, untouched] == 7).all()
    assert_same(caches[1][layers:], caches[0][layers:])


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split rows into so few parts that a part has several blocks, as in large batches."""
    from sglang_dflash.kernels.logits import triton as logits

    monkeypatch.setattr(logits, "PROGRAMS", PROGRAMS)


@runs_kernel
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 4096), (2, 9001), (MANY, 30000)])
def test_argmax_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    """Few distinct values, so that most rows have a tied maximum."""
    torch.manual_seed(width)
    logits = (draw(40, rows, width) - 20).to(dtype)
    assert_same(TRITON.argmax_rows(logits), TORCH.argmax_rows(logits))
    wide = torch.randn(rows, width, device=DEVICE).to(dtype) * 4
    assert_same(TRITON.argmax_rows(wide, 30.0), TORCH.argmax_rows(wide, 30.0))
    saturated = logits * 1e4
    assert_same(TRITON.argmax_rows(saturated, 30.0), TORCH.argmax_rows(saturated, 30.0))


@runs_kernel
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 4096), (MANY, 9001)])
def test_peak_probabilities(rows: int, width: int, dtype: torch.dtype) -> None:
    """Flat and peaked rows, ties, NaN, and the padding of a wider tensor, which has no mass."""
    torch.manual_seed(width)
    wide = torch.randn(rows, width + 7, device=DEVICE) * torch.logspace(-1, 1, rows)[:, None].to(
        DEVICE
    )
    wide[:, ::3] = float("nan")
    wide[:, width:] = 100.0
    wide[-1, :width] = float("nan")
    wide[0] = 4.0
    logits = wide.to(dtype)[:, :width]
    for cap in (0.0, 30.0):
        found, expected = (ops.peak_probabilities(logits, cap) for ops in (TRITON, TORCH))
        # sums of up to 9000 terms, in another order
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
        assert found[0].item() == pytest.approx(1 / width) and (rows == 1 or found[-1] == 0)


def make_noise(*scales: float, rows: int = 16) -> Noise:
    keys = torch.empty(len(scales), rows, dtype=torch.int64, device=DEVICE).random_()
    return Noise(keys, torch.tensor(scales, device=DEVICE))


@runs_kernel
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 4096), (2, 9001), (MANY // 2, 9000)])
def test_argmax_rows_with_noise(rows: int, width: int, dtype: torch.dtype) -> None:
    """Requests with little, no and much noise; each has fewer rows than there are keys."""
    torch.manual_seed(width)
    logits = (torch.randn(3 * rows, width, device=DEVICE) * 3).to(dtype)
    noise = make_noise(0.3, 0.0, 1.5)
    for cap in (0.0, 30.0):
        found = TRITON.argmax_rows(logits, cap, noise)
        assert_same(found, TORCH.argmax_rows(logits, cap, noise))
        plain = TORCH.argmax_rows(logits, cap)
        assert_same(found[rows : 2 * rows], plain[rows : 2 * rows])
        assert width < 100 or not torch.equal(found[2 * rows :], plain[2 * rows :])
        both = TRITON.argmax_and_sample(logits, cap, noise)
        assert_same(both, TORCH.argmax_and_sample(logits, cap, noise))
        assert_same(both[0], TORCH.argmax_rows(logits))
        assert_same(both[1], torch.where(found == plain, both[0], found))


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(2, 7), (6, 300), (4, 5001)])
def test_sample_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    """The first half of the rows has noise, the second takes the first of the tied maxima."""
    torch.manual_seed(width)
    logits = (torch.randn(rows, width, device=DEVICE) * 6).to(dtype)
    # few distinct values: in most rows the k-th is tied
    logits[rows // 2 :] = (logits[rows // 2 :] / 4).round() * 4
    logits[0, ::3] = float("-inf")
    filters = {
        "temperatures": torch.tensor([0.7, 1.5], device=DEVICE),
        "top_ks": torch.tensor([20, 3], dtype=torch.int32, device=DEVICE),
        "top_ps": torch.tensor([0.9, 1.0], device=DEVICE),
    }
    for cap in (0.0, 30.0):
        for _ in range(2):
            noise = make_noise(0.7, 0.0)
            found = TRITON.sample_rows(logits, noise, **filters, logit_cap=cap)
            assert_same(found, TORCH.sample_rows(logits, noise, **filters, logit_cap=cap))


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likely_tokens_that_share_a_lane_are_all_seen(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likely tokens so far apart that one lane reads them all, and its maximum shows only one."""
    from sglang_dflash.kernels.sampling import top_k

    monkeypatch.setattr(top_k, "BLOCK", 64)
    monkeypatch.setattr(top_k, "CANDIDATES", 32)
    torch.manual_seed(0)
    likely = 36
    logits = torch.randn(2, 64 * likely, device=DEVICE)
    logits[:, 5::64] = 50.0 + torch.randperm(likely, device=DEVICE) / 2
    logits = logits.to(dtype)
    filters = {
        "temperatures": torch.tensor([3.0, 5.0], device=DEVICE),
        "top_ks": torch.tensor([20, 4], device=DEVICE),
        "top_ps": torch.ones(2, device=DEVICE),
    }
    noise = make_noise(3.0, 5.0)
    found = TRITON.sample_rows(logits, noise, **filters)
    assert_same(found, TORCH.sample_rows(logits, noise, **filters))


@runs_kernel
@pytest.mark.parametrize(
    ("likely", "rest", "top_k"),
    [
        # the k-th lies in a tied tail
        ((100, 1.0), -20.0, 128),
        ((100, 1.0), float("-inf"), 128),
        # more ties at the k-th than candidates; in the second case they are the likeliest tokens
        ((260, 10.0), -3.0, 64),
        ((3000, 30.0), -3.0, 1),
        # ties that fit among the candidates
        ((140, 10.0), -3.0, 128),
        ((200, 10.0), -3.0, 64),
    ],
    ids=["tail", "masked tail", "beyond candidates", "likeliest", "within, 128", "within, 64"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likelier_tokens_remain_however_many_equal_the_kth(
    likely: tuple[int, float], rest: float, top_k: int, dtype: torch.dtype
) -> None:
    """If this broke, a token with nearly all of the probability mass would never be sampled."""
    width, (count, value) = 6000, likely
    logits = torch.full((4, width), rest, device=DEVICE)
    logits[:, width // 2 : width // 2 + count] = value
    # after all its rivals: certain in the first request, as likely as all of them in the second
    peak = width - 5
    logits[:2, peak] = 30.0
    logits[2:, peak] = value + math.log(count)
    logits = logits.to(dtype)
    filters = {
        "temperatures": torch.tensor([0.9, 1.1], device=DEVICE),
        "top_ks": torch.full((2,), top_k, device=DEVICE),
        "top_ps": torch.tensor([0.99, 1.0], device=DEVICE),
    }
    for scales in ((0.9, 1.1), (0.0, 0.0)):
        noise = make_noise(*scales)
        found = TRITON.sample_rows(logits, noise, **filters)
        assert_same(found, TORCH.sample_rows(logits, noise, **filters))
        if value < 30:
            assert found[:2].tolist() == [peak, peak]


@runs_kernel
def test_sampling_skips_what_is_no_number_and_takes_the_first_of_equals() -> None:
    logits = torch.full((3, 5000), -3.0, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 4000] = logits[:, 17] = 5.0
    logits[:, 3] = float("nan")
    filters = {
        "temperatures": torch.ones(3, device=DEVICE),
        "top_ks": torch.tensor([1, 2, 2], device=DEVICE),
        "top_ps": torch.ones(3, device=DEVICE),
    }
    draws = [
        TRITON.sample_rows(logits, make_noise(0.0, 0.0, 1.0), **filters).tolist() for _ in range(16)
    ]
    first, second, drawn = (set(each) for each in zip(*draws, strict=True))
    assert first == second == {17}
    assert drawn == {17, 4000}


@runs_kernel
def test_a_draw_from_a_slice_reads_its_own_rows() -> None:
    logits = torch.randn(4, 300, device=DEVICE, dtype=torch.float32)
    logits[:, 250:] = 100.0
    found = TRITON.sample_rows(
        logits[:, :250],
        make_noise(1.0, 1.0, 1.0, 1.0),
        temperatures=torch.ones(4, device=DEVICE),
        top_ks=torch.full((4,), 8, device=DEVICE),
        top_ps=torch.ones(4, device=DEVICE),
    )
    assert (found < 250).all()


@runs_kernel
def test_argmax_of_a_slice_reads_its_own_rows() -> None:
    """The head's vocabulary is padded; the padding must not win."""
    logits = torch.randn(4, 300, device=DEVICE)
    logits[:, 250:] = 100.0
    assert_same(TRITON.argmax_rows(logits[:, :250]), TORCH.argmax_rows(logits[:, :250]))


@runs_kernel
@pytest.mark.parametrize("window", [-1, 5, 2000])
def test_index_prefixes(window: int) -> None:
    torch.manual_seed(0)
    table = draw(5000, 12, 3000).int()
    lens = torch.tensor([0, 1, 2600, 5, 6, 1024], device=DEVICE)
    rows = torch.randperm(12, device=DEVICE)[:6]
    slot_map = torch.randperm(5000, device=DEVICE)
    found = []
    for index in (TORCH.index_prefixes, TRITON.index_prefixes):
        bounds = torch.full((7,), -1, dtype=torch.int32, device=DEVICE)
        slots = torch.full((4000,), -1, dtype=torch.int64, device=DEVICE)
        starts = torch.full((6,), -1, dtype=torch.int32, device=DEVICE)
        index(table, rows, lens, bounds, slots, window=window, starts=starts, slot_map=slot_map)
        bare = (bounds.clone(), slots.clone())
        index(table, rows, lens, *bare, window=window)
        found.append((bounds, slots, starts, *bare))
    assert_same(*found)


@runs_kernel
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("dtype", "draft_dtype"),
    [
        pytest.param(torch.float32, torch.float32, id="fp32"),
        pytest.param(torch.bfloat16, torch.bfloat16, id="bf16"),
        pytest.param(torch.float32, torch.bfloat16, id="fp32, drafts bf16"),
    ],
)
@pytest.mark.parametrize(("rows", "width"), [(2, 5), (16, 700), (5, 4100)])
def test_reject_by_block(
    rows: int, width: int, dtype: torch.dtype, draft_dtype: torch.dtype
) -> None:
    """Sampled and argmax drafts, with little, no and much noise; a drafter close to the target,
    so that every accept length occurs; rows with NaN; a drafter that lacks every other token, and
    one that has the first four only, as after a selector."""
    torch.manual_seed(width)
    requests = 9
    noise = make_noise(*[0.3, 0.0, 1.5] * 3, rows=rows + 1)
    logits = torch.randn(requests, rows, width, device=DEVICE) * 3
    near = logits[:, :-1] + 0.3 * torch.randn(requests, rows - 1, width, device=DEVICE)
    logits, near = logits.to(dtype), near.to(draft_dtype)
    bad = (rows - 1) // 2
    near[3, bad] = float("nan")
    logits[5, 0, 0] = float("nan")
    near[2, :, 1::2] = float("-inf")
    near[0, :, 4:] = float("-inf")
    is_sampled = torch.arange(requests, device=DEVICE) < 6
    uniforms = torch.rand(requests, rows - 1, device=DEVICE)
    lens = draw(90, requests)
    for cap in (0.0, 30.0):
        both = TORCH.argmax_and_sample(near.flatten(0, 1), cap, noise)
        argmax_drafts, sampled_drafts = both.view(2, requests, rows - 1)
        drafts = torch.where(is_sampled[:, None], sampled_drafts, argmax_drafts)
        assert (drafts[2] % 2 == 0).all() and (drafts[0] < 4).all()
        asked = (logits, near, drafts, argmax_drafts, noise, uniforms)
        one, two = (
            Verdict(*ops.reject_by_block(*asked, is_sampled=is_sampled, logit_cap=cap))
            for ops in (TORCH, TRITON)
        )
        assert_same(two.num_correct, one.num_correct)
        noisy = noise.scales > 0
        assert_same(one.num_correct == COUNT_MATCHES, ~(is_sampled & noisy))
        token_ids = torch.cat([drafts[:, :1], drafts], dim=1)
        commits = [
            TORCH.accept_block(token_ids, each.choices, lens, token_ids, each.num_correct)
            for each in (one, two)
        ]
        assert_same(*commits)
        committed = torch.arange(rows, device=DEVICE) < commits[0][0][:, None]
        assert_same(two.choices[committed], one.choices[committed])
        torch.testing.assert_close(two.advantage[noisy], one.advantage[noisy], atol=1e-5, rtol=1e-4)
        assert one.num_correct[3] <= bad
        assert_same(one.choices[1], TORCH.argmax_rows(logits[1], cap))
    if rows > 2:
        assert 0 < one.num_correct[is_sampled & noisy].float().mean() < rows - 1


if not INTERPRETED:

    def test_every_kernel_holds_in_the_interpreter() -> None:
        hold_in_the_interpreter(__file__)
