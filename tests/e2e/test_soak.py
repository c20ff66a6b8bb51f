"""A short soak in every test run; `python -m benchmarks.soak` is the long one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import soak, soak_requests
from benchmarks.soak_requests import Answer, Ask, flaw, gap_at_first_difference, seeded_race
from benchmarks.soak_storm import Outcome, Pair
from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.server import SCHEDULES


def test_a_storm_of_mixed_requests_leaves_nothing_wrong_and_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With overlap scheduling and plan stream: more happens at once, and requests end a step late.
    Half of the requests run on updated weights."""
    for name, value in SCHEDULES["plan stream"].items():
        monkeypatch.setenv(name, value)
    options = soak.parse(["--requests", "80", "--updates", "1"])
    with soak.serving(options) as pairs:
        report = soak.run(pairs, options)
    assert soak.faults(report) == []
    assert set(report["by_kind"]) == set(soak_requests.COMPARED)
    assert report["schedule"] == ["plan stream"] and report["updates"] == 1
    assert report["aborted"] > 4 and report["prefix_hits"] > 4


def test_the_report_is_written_before_the_servers_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopping many servers is slow, and a caller waiting for the report may time out meanwhile."""
    seen = []

    @contextlib.contextmanager
    def serving(_: object) -> Iterator[list[Pair]]:
        yield []
        seen.append((tmp_path / "soak.json").is_file())

    report = {**vars(Outcome()), "seconds": 1.0, "pool": 1}
    monkeypatch.setattr(soak, "serving", serving)
    monkeypatch.setattr(soak, "run", lambda *_: report)
    monkeypatch.setattr("sys.argv", ["soak.py", "--out", str(tmp_path / "soak")])
    with pytest.raises(SystemExit, match="0"):
        soak.main()
    assert seen == [True]


def fp64_logits(ids: list[int], weights: Path) -> torch.Tensor:
    with torch.no_grad():
        target = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64)
        return target(torch.tensor([ids])).logits[0, -1]


def test_only_tokens_that_are_equal_in_fp64_count_as_a_tie() -> None:
    """Otherwise the soak would excuse wrong answers."""
    ask = {"body": {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0.0}}}
    weights = tiny_target()
    assert (
        gap_at_first_difference(ask, [8, 9, 10], [8, 11, 10], weights=weights) > soak_requests.TIE
    )
    assert gap_at_first_difference(ask, [8, 9], [8], weights=weights) == float("inf")


def test_a_tie_is_looked_for_under_the_weights_that_were_in_force(tmp_path: Path) -> None:
    """After an update, a wrong answer could be a tie under the old weights."""
    other = soak_requests.write_other_weights(tmp_path)
    ask = {"body": {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0.0}}}
    for weights in (tiny_target(), other):
        logits = fp64_logits([5, 6, 7, 8], weights)
        gap = gap_at_first_difference(ask, [8, 9], [8, 11], weights=weights)
        assert gap == pytest.approx(abs(logits[9] - logits[11]).item())
    assert not torch.equal(
        fp64_logits([5, 6, 7], other).argsort(), fp64_logits([5, 6, 7], tiny_target()).argsort()
    )


def test_a_seeded_draw_is_judged_with_the_noise_of_its_seed() -> None:
    """A server sampled these twelve tokens; with other noise, close draws would count as wrong."""
    prompt = [5, 6, 7]
    drawn = [350, 781, 17, 346, 17, 308, 299, 290, 669, 262, 15, 338]
    params = {"temperature": 1.4, "top_k": 40, "sampling_seed": 11}
    for k, token in enumerate(drawn):
        ids = prompt + drawn[:k]
        race = seeded_race(fp64_logits(ids, tiny_target()), params, position=len(ids) - 1)
        assert race.argmax() == token
    ask = {"body": {"input_ids": prompt, "sampling_params": params}}
    # by far the closest runner-up in the race above, and their logits are not close
    gap = gap_at_first_difference(ask, drawn[:6], [*drawn[:5], 844], weights=tiny_target())
    assert gap == pytest.approx(0.082, abs=0.001)


@pytest.mark.parametrize(
    ("tokens", "finish", "options", "found"),
    [
        ([7, 8, 9], {"type": "length"}, {}, None),
        ([7, 2], {"type": "stop"}, {}, None),
        ([7, 8], None, {"abort_after": 2}, None),
        ([7, 8], None, {}, "has no finish reason"),
        ([7, 8], {"type": "length"}, {}, "after 2 tokens"),
        ([7, 8], {"type": "abort"}, {}, "after 2 tokens"),
        ([7, 8, 9, 10], {"type": "length"}, {}, "4 tokens, asked for 3"),
        ([7, 2, 9], {"type": "length"}, {}, "continued after EOS"),
        ([7, 2, 9], {"type": "length"}, {"ignore_eos": True}, None),
        ([7, 2], {"type": "stop"}, {"ignore_eos": True}, "after 2 tokens"),
        ([7, 1024, 9], {"type": "length"}, {}, "outside the vocabulary"),
    ],
)
def test_a_sampled_answer_must_end_as_asked(
    tokens: list[int], finish: dict[str, Any] | None, options: dict[str, Any], found: str | None
) -> None:
    """There is no reference answer to compare it with."""
    params = {"max_new_tokens": 3, "ignore_eos": options.get("ignore_eos", False)}
    ask = Ask("sampled", {"sampling_params": params}, True, options.get("abort_after"))
    reason = flaw(ask, Answer(tokens, finish, cached=0))
    assert reason is None if found is None else reason is not None and found in reason


def test_what_one_pair_lacks_is_not_made_up_for_by_another() -> None:
    """A sum would hide a leak in one of several servers."""
    fine = {"memory_mb": [[100] * 6], "free_kv_slots": [2200], "requests": 4}
    leaky = {"memory_mb": [[100, 100, 100, 190, 200, 210]], "free_kv_slots": [2199], "requests": 4}
    total = Outcome()
    for part in (fine, leaky):
        total.add(Outcome(**part, by_kind=Counter(greedy=4)))
    assert total.by_kind == {"greedy": 8} and total.requests == 8
    found = soak.faults({**vars(total), "pool": 2200})
    assert found == ["[2200, 2199] of 2200 KV slots are free", "memory grew by [0, 110] MB"]


def test_an_answer_that_never_came_is_a_fault() -> None:
    report = {**vars(Outcome(requests=3, by_kind=Counter(greedy=2))), "pool": 1}
    assert soak.faults(report) == ["2 answers to 3 requests"]
