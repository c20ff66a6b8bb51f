"""Steps whose requests share rows: kernels against twins, and each request against itself alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sglang_dflash.kernels import COUNT_MATCHES, TORCH, Noise, Ops, triton_ops
from sglang_dflash.kernels.packing import places
from sglang_dflash.kernels.sampling.reference import SALT
from tests.kernels.interpreter import DEVICE, INTERPRETED, hold_in_the_interpreter, runs_kernel

if INTERPRETED or torch.cuda.is_available():
    TRITON = triton_ops()

SMALL = [(1, 2), (1, 16), (2, 5), (7, 16), (7, 3), (33, 8)]
# in one program
BATCHES = [*SMALL, (256, 2), (256, 16)]
# in a program per request, of which the interpreter runs one after the other
MANY = 40 if INTERPRETED else 256


def draw(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device=DEVICE)


def assert_same(one: object, two: object) -> None:
    """Assert exactly equal values and dtypes."""
    torch.testing.assert_close(one, two, atol=0, rtol=0)


def make_bounds(requests: int, width: int, spread: str = "random") -> torch.Tensor:
    rows = {
        "one each": torch.ones(requests, dtype=torch.int64, device=DEVICE),
        "all": torch.full((requests,), width, device=DEVICE),
        "random": 1 + draw(width, requests),
    }[spread]
    return torch.cat([rows.new_zeros(1), rows.cumsum(0)])


def totals(requests: int, width: int) -> list[int]:
    """Numbers of rows to share: the fewest, the most, and some between."""
    most = requests * width
    between = {requests + 1, (requests + most) // 2, most - 1, requests + requests // 3}
    return sorted({requests, most, *(n for n in between if requests <= n <= most)})


def survival_of(
    confidence: torch.Tensor, offsets: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    """In float64, one draft after the other."""
    found = torch.ones(confidence.shape[0], dtype=torch.float64, device=DEVICE)
    columns = []
    for k, column in enumerate(confidence.double().unbind(1)):
        c = torch.where(column.isnan(), 1e-6, column).clamp(1e-6, 1 - 1e-6)
        found = found / (1 + torch.exp(-offsets[k] - slopes[k] * torch.log(c / (1 - c))))
        columns.append(found)
    return torch.stack(columns, dim=1)


def shared_by_hand(survival: torch.Tensor, num_rows: int) -> list[int]:
    """Give one row at a time to the draft that is likeliest to survive, and return the bounds."""
    requests, drafts = survival.shape
    order = [(-float(survival[r, k]), r, k) for r in range(requests) for k in range(drafts)]
    rows = [1] * requests
    for _, request, column in sorted(order)[: num_rows - requests]:
        assert rows[request] == column + 1, "not the request's next draft"
        rows[request] += 1
    return [sum(rows[:r]) for r in range(requests + 1)]


@runs_kernel
@pytest.mark.parametrize(("requests", "width"), BATCHES)
def test_share_rows(requests: int, width: int) -> None:
    """Random confidence with a wide spread, NaN, 0 and 1; columns of a wider tensor."""
    torch.manual_seed(width)
    confidence = torch.rand(requests, width + 2, device=DEVICE).sqrt()[:, : width - 1]
    confidence[draw(9, requests, width - 1) == 0] = float("nan")
    offsets, slopes = torch.randn(2, width + 3, device=DEVICE)
    slopes = 1 + slopes / 4
    survival = survival_of(confidence, offsets, slopes)
    for num_rows in totals(requests, width):
        one, two = (
            ops.share_rows(confidence, offsets, slopes, num_rows) for ops in (TORCH, TRITON)
        )
        expected = shared_by_hand(survival, num_rows)
        sums = []
        for bounds in (one, two):
            assert bounds.dtype == torch.int64 and bounds.shape == (requests + 1,)
            assert (bounds[0], bounds[-1]) == (0, num_rows)
            rows = bounds[1:] - bounds[:-1]
            assert rows.min() >= 1 and rows.max() <= width
            chosen = torch.arange(width - 1, device=DEVICE) < rows[:, None] - 1
            sums.append(float(survival[chosen].sum()))
        best = sum(float(survival[r, : e - b - 1].sum()) for r, (b, e) in by_request(expected))
        assert sums == pytest.approx([best, best], abs=1e-5)
        ranked = survival.flatten().sort(descending=True).values
        at = num_rows - requests
        if at in (0, ranked.numel()) or ranked[at - 1] - ranked[at] > 1e-5 * ranked[at]:
            assert one.tolist() == two.tolist() == expected


def by_request(bounds: list[int]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(pairwise(bounds)))


@runs_kernel
@pytest.mark.parametrize(("requests", "width"), BATCHES)
def test_on_ties_the_lower_request_and_column_go_first(requests: int, width: int) -> None:
    """Equal rows; certain drafts, all of survival 1; hopeless ones, whose survival is 0 in fp32."""
    offsets, slopes = torch.zeros(width, device=DEVICE), torch.full((width,), 0.1, device=DEVICE)
    row = torch.linspace(0.9, 0.5, width - 1, device=DEVICE)
    batches = [
        (row.expand(requests, -1).contiguous(), offsets),
        (torch.full((requests, width - 1), float("nan"), device=DEVICE), offsets),
        (torch.ones(requests, width - 1, device=DEVICE), offsets + 100.0),
        (torch.zeros(requests, width - 1, device=DEVICE), offsets - 200.0),
    ]
    for which, (confidence, shifted) in enumerate(batches):
        for num_rows in totals(requests, width):
            found = [
                ops.share_rows(confidence, shifted, slopes, num_rows) for ops in (TORCH, TRITON)
            ]
            if which < 2:
                by_column = torch.arange(width - 1, 0, -1, device=DEVICE).expand(requests, -1)
                expected = shared_by_hand(by_column, num_rows)
            else:
                # one request after the other
                expected = shared_by_hand(torch.zeros(requests, width - 1), num_rows)
            assert found[0].tolist() == found[1].tolist() == expected


@runs_kernel
@pytest.mark.parametrize(("requests", "width"), [*SMALL, (MANY, 2), (MANY, 16), (5, 32)])
def test_pack_rows(requests: int, width: int) -> None:
    torch.manual_seed(width)
    blocks = draw(9000, 3, requests, width)
    for spread in ("one each", "all", "random"):
        bounds = make_bounds(requests, width, spread)
        outputs = []
        for ops in (TORCH, TRITON):
            out = torch.full((4, int(bounds[-1])), -1, device=DEVICE)
            ops.pack_rows(
                *(bounds, *blocks),
                out_token_ids=out[0],
                out_positions=out[1],
                out_slots=out[2],
                requests=out[3],
            )
            outputs.append(out)
        assert_same(*outputs)
        for request, (begin, end) in by_request(bounds.tolist()):
            assert_same(outputs[0][:3, begin:end], blocks[:, request, : end - begin])
            assert (outputs[0][3, begin:end] == request).all()


@runs_kernel
@pytest.mark.parametrize(("requests", "width"), [*SMALL, (MANY, 4), (5, 32)])
def test_accept_block(requests: int, width: int) -> None:
    """Each request commits what it would commit alone, with as many rows."""
    torch.manual_seed(width)
    for spread in ("one each", "all", "random"):
        bounds = make_bounds(requests, width, spread)
        total = int(bounds[-1])
        token_ids, choices, slots = draw(2, total), draw(2, total), 1 + draw(1000, total)
        # some blocks all correct, and the next request's anchor after the last row
        right = draw(2, requests).repeat_interleave(bounds[1:] - bounds[:-1]) > 0
        token_ids[1:] = torch.where(right[1:], choices[:-1], token_ids[1:])
        lens, told = draw(90, requests), draw(width + 2, requests).int() + COUNT_MATCHES
        for num_correct in (None, told):
            shared = (token_ids, choices, lens, slots, num_correct, bounds, width)
            one, two = (ops.accept_block(*shared) for ops in (TORCH, TRITON))
            assert_same(one, two)
            for request, (begin, end) in by_request(bounds.tolist())[:20]:
                own = slice(request, request + 1)
                block = (each[None, begin:end] for each in (token_ids, choices, slots))
                alone, own_choices, own_slots = block
                clamped = told[own].clamp(max=end - begin - 1)
                expected = TORCH.accept_block(
                    *(alone, own_choices, lens[own], own_slots),
                    None if num_correct is None else clamped,
                )
                commit_lens, committed, bonus, new_lens, kept = expected
                padding = committed.new_zeros(1, width - end + begin)
                assert_same(one[1][own], torch.cat([committed, padding], dim=1))
                assert_same((one[0][own], one[2][own]), (commit_lens, bonus))
                assert_same((one[3][own], one[4][None, begin:end]), (new_lens, kept))


def check_alone(
    ops: Ops,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    asked: tuple[torch.Tensor, ...],
    noise: Noise,
    is_sampled: torch.Tensor,
    bounds: torch.Tensor,
    cap: float,
) -> None:
    """Compare each request with itself alone, in as many rows as it has of the shared ones."""
    logits, near, drafts, argmax_drafts, uniforms = asked
    choices, num_correct, advantage = shared
    for request, (begin, end) in by_request(bounds.tolist())[-9:]:
        own, width = slice(request, request + 1), end - begin
        assert not advantage[request, width - 1 :].any()
        if width == 1:
            # without drafts: a draw from the target's own distribution, at the residual's noise
            assert num_correct[request] <= 0
            own_noise = Noise(noise.keys[own] ^ SALT, noise.scales[own])
            numbers = logits[begin:end].nan_to_num(nan=-1e4)
            assert_same(choices[begin:end], TORCH.argmax_rows(numbers, cap, own_noise))
            continue
        block = (near, drafts, argmax_drafts)
        alone = ops.reject_by_block(
            *(logits[None, begin:end], *(each[own, : width - 1] for each in block)),
            *(Noise(noise.keys[own], noise.scales[own]), uniforms[own, : width - 1]),
            is_sampled=is_sampled[own],
            logit_cap=cap,
        )
        assert_same(num_correct[own], alone[1])
        assert_same(choices[None, begin:end], alone[0])
        torch.testing.assert_close(advantage[own, : width - 1], alone[2], atol=1e-6, rtol=1e-5)


@runs_kernel
@pytest.mark.parametrize(
    ("requests", "width", "vocabulary", "dtype"),
    [
        (1, 2, 5, torch.float32),
        (2, 16, 60, torch.bfloat16),
        (7, 4, 4100, torch.float32),
        (33, 3, 300, torch.bfloat16),
    ],
)
def test_reject_by_block(requests: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Sampled and argmax drafts, with little, no and much noise; NaN rows, also among drafts that
    are not verified."""
    torch.manual_seed(vocabulary)
    keys = torch.empty(requests, width + 1, dtype=torch.int64, device=DEVICE).random_()
    scales = torch.tensor([0.3, 1.5, 0.0], device=DEVICE).repeat(requests)[:requests]
    noise, is_sampled = Noise(keys, scales), torch.arange(requests, device=DEVICE) % 5 < 4
    whole = torch.randn(requests, width, vocabulary, device=DEVICE) * 3
    near = whole[:, :-1] + 0.3 * torch.randn_like(whole[:, :-1])
    whole, near = whole.to(dtype), near.to(dtype)
    near[requests // 2, width // 2 :] = whole[requests // 3, 0, 0] = float("nan")
    uniforms = torch.rand(requests, width - 1, device=DEVICE)
    cap = 30.0 if requests % 2 else 0.0
    both = TORCH.argmax_and_sample(near.flatten(0, 1), cap, noise).view(2, requests, width - 1)
    argmax_drafts, drafts = both[0], torch.where(is_sampled[:, None], both[1], both[0])
    kept = []
    for spread in ("one each", "all", "random"):
        bounds = make_bounds(requests, width, spread)
        owners, columns = places(bounds, int(bounds[-1]))
        logits = whole[owners, columns]
        found = []
        for ops in (TORCH, TRITON):
            shared = ops.reject_by_block(
                *(logits, near, drafts, argmax_drafts, noise, uniforms),
                is_sampled=is_sampled,
                logit_cap=cap,
                bounds=bounds,
                requests=owners,
            )
            asked = (logits, near, drafts, argmax_drafts, uniforms)
            check_alone(ops, shared, asked, noise, is_sampled, bounds, cap)
            found.append(shared)
        one, two = found
        assert_same(one[1], two[1])
        committed = columns <= one[1][owners]
        assert_same(two[0][committed], one[0][committed])
        noisy = scales > 0
        torch.testing.assert_close(two[2][noisy], one[2][noisy], atol=1e-5, rtol=1e-4)
        kept.append(one[1])
    if requests > 2:
        assert len(torch.cat(kept).unique()) > 3, "too few accept lengths"


if not INTERPRETED:

    def test_every_kernel_holds_in_the_interpreter() -> None:
        hold_in_the_interpreter(__file__)
