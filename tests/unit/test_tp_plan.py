"""The arithmetic of benchmarks/tp_plan.py: what it must reproduce, and what can never happen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT, tp_plan
from benchmarks.systems import BLOCK_SIZE
from benchmarks.tp_plan import CARDS, RANKS, Measured, Model

SERVING = ROOT / "benchmarks" / "results" / "serving-h200.json"
SHAPES = ROOT / "benchmarks" / "shapes"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(SERVING.read_text())


@pytest.fixture(scope="module")
def model(found: dict[str, Any]) -> Model:
    pair = tp_plan.read_pair(SHAPES / "gemma4-31b", found["results"]["ours"]["memory_gb"])
    return Model(pair, Measured.from_serving(found, SERVING.name))


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_one_card_takes_the_step_that_was_measured(
    model: Model, found: dict[str, Any], requests: int
) -> None:
    [measured] = [
        point["step_ms"]
        for point in found["results"]["ours"]["points"]
        if (point["requests"], point["context"]) == (requests, 512)
    ]
    ms = model.costs(requests, CARDS["H200"], 1).step_ms(requests, 0)
    assert ms[BLOCK_SIZE - 1] == pytest.approx(measured, rel=1e-6)


def test_one_rank_talks_to_nobody(model: Model) -> None:
    for card in CARDS.values():
        assert tp_plan.communication_ms(model.pair, 512, card, 1, 10.0) == (0.0, 0.0)


def test_an_all_reduce_takes_its_latency_and_two_trips() -> None:
    """450 MB, of which half passes the links of each of two ranks, twice: 1 ms at 450 GB/s."""
    ms = tp_plan.collective_ms(450e6, CARDS["H100"], 2, latency_us=10, trips=2)
    assert ms == pytest.approx(1 + 0.010)


@pytest.mark.parametrize("field", ["memory", "link", "flops"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_card_that_is_twice_as_fast_is_never_slower(model: Model, field: str, ranks: int) -> None:
    for card in CARDS.values():
        better = card._replace(**{field: 2 * getattr(card, field)})
        for requests in (1, 8, 32, 128, 256):
            before = model.costs(requests, card, ranks).step_ms(requests, 0)
            after = model.costs(requests, better, ranks).step_ms(requests, 0)
            assert (after <= before).all()


def test_memory_bandwidth_counts_at_one_request(model: Model) -> None:
    """Nearly all of a step is reading weights: 58.5 of 61.5 GiB, in 15 of 19 ms."""
    card = CARDS["H200"]
    step = model.verify_ms(16, 1, card, 1)
    assert model.verify_ms(16, 1, card._replace(memory=2 * card.memory), 1) < 0.6 * step


def test_ranks_divide_the_work_but_not_the_rest(model: Model) -> None:
    """With links that cost nothing, eight ranks are faster, but not eight times."""
    free = Model(model.pair, model.measured, latency_us=0.0)
    card = CARDS["H200"]._replace(link=1e30)
    one, eight = (free.verify_ms(128, 8, card, ranks) for ranks in (1, 8))
    rest = tp_plan.between(model.measured.rest, 128)
    assert one / 8 < eight < one / 2
    # not quite an eighth: two ranks hold the same one of a full layer's four KV heads
    assert eight - rest == pytest.approx((one - rest) / 8, rel=0.1)


def test_a_slow_network_narrows_the_step(model: Model) -> None:
    """The policy is the server's: where a row costs more, it verifies fewer."""
    card = CARDS["H200"]
    near, far = (
        tp_plan.chosen(model.costs(32, each, 8), 32, 4.2)
        for each in (card, card._replace(link=card.link / 100))
    )
    assert far.width < near.width and far.tokens_per_s < near.tokens_per_s


def test_low_acceptance_under_load_drafts_nothing_or_little(model: Model) -> None:
    costs = model.costs(256, CARDS["H200"], 8)
    widths = [tp_plan.chosen(costs, 256, length).width for length in (1.0, 2.0, 4.2, 8.0)]
    assert widths[0] == 1 and widths == sorted(widths)


def test_costs_of_a_server_are_read_back(model: Model) -> None:
    """A server's table, made of known numbers, gives these numbers for one card."""
    costs = {
        "verify_ms": {"16": 18.0, "128": 22.0, "512": 50.0},
        "draft_ms": {"1": 1.5, "8": 1.8, "32": 3.0},
        "head_ms": {},
        "ms_per_context_token": 0.0,
    }
    info = {"internal_states": [{"sglang_dflash": {"width": {"costs": costs}}}]}
    for told in (info, {"costs": costs}):
        own = Model(model.pair, Measured.from_server_info(told, "server"))
        for requests, expected in ((1, 19.5), (8, 23.8), (32, 53.0)):
            ms = own.costs(requests, CARDS["H200"], 1).step_ms(requests, 0)
            assert ms[BLOCK_SIZE - 1] == pytest.approx(expected)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    for name, config in (("moe", {"num_experts": 128}), ("moe-draft", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="is a mixture of experts"):
        tp_plan.read_pair(tmp_path / "moe", {})


def test_the_report_says_what_it_is_and_what_does_not_fit(model: Model) -> None:
    text = tp_plan.report(model)
    assert text.startswith("**Arithmetic, not measurement.**")
    assert text.count("| tp ") == len(CARDS) * len(tp_plan.ACCEPT_LENGTHS) * len(RANKS)
    # 42,000 tokens of KV fit beside 61 GiB of weights on 80 GB at most
    [row] = [line for line in text.splitlines() if line.startswith("| tp 1")][:1]
    assert row.endswith("| does not fit | does not fit |")


def test_the_page_shows_what_the_program_prints(model: Model) -> None:
    """The page leaves the units to its heading."""
    printed = tp_plan.table(model, "H200", 4.2).replace(" rows", "").replace(" tok/s", "")
    page = (ROOT / "docs" / "several-cards.md").read_text()
    for row in printed.splitlines():
        assert not row.startswith("| tp ") or row in page
