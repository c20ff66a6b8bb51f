"""`tune`: what is tried, and what is chosen, on machines that these tests make up."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import pytest

from sglang_dflash.__main__ import make_parser
from sglang_dflash.commands.tune import (
    Trial,
    choose,
    larger_fraction,
    make_plan,
    reason,
    report,
    search,
)
from sglang_dflash.commands.tune_settings import Plan, Settings, default_blocks
from sglang_dflash.pairs import tiny_drafter, tiny_target

FIRST = Settings(16, "auto", "triton", "fa4", 0.85)
GPU = Plan(FIRST, ("fa4", "triton"), ("triton", None), (16, 8, 4), ("auto", "full"))


def options(*words: str) -> argparse.Namespace:
    """The options for 1 and 8 requests."""
    pair = ["--model-path", str(tiny_target()), "--speculative-draft-model-path"]
    found = make_parser().parse_args(["tune", *pair, str(tiny_drafter()), *words])
    found.server_args = []
    return found


def on(rate: Callable[[Settings], float], free_gib: float = 2.0) -> Callable[[Settings], Trial]:
    """Return a machine with this rate; at 8 requests it is four times as high."""

    def try_(settings: Settings) -> Trial:
        found = 50.0 if settings.is_plain else rate(settings)
        if not found:
            return Trial(settings, {}, error="RuntimeError: no such kernel")
        return Trial(settings, {1: found, 8: 4 * found}, 1000, free_gib, 100.0)

    return try_


def test_each_thing_is_varied_on_top_of_the_best_so_far() -> None:
    def rate(settings: Settings) -> float:
        return 100.0 * (1.2 if settings.draft_backend == "triton" else 1) * (24 - settings.block)

    trials = search(GPU, on(rate))
    assert choose(trials).settings == replace(FIRST, draft_backend="triton", block=4)
    # plain, first, a draft backend, a target backend, two blocks, a width: not all combinations
    assert [str(trial.settings) for trial in trials] == [
        "plain decoding",
        "block size 16, target on triton, draft on fa4, memory fraction 0.85",
        "block size 16, target on triton, draft on triton, memory fraction 0.85",
        "block size 16, target on SGLang's choice, draft on triton, memory fraction 0.85",
        "block size 8, target on triton, draft on triton, memory fraction 0.85",
        "block size 4, target on triton, draft on triton, memory fraction 0.85",
        "block size 4, width 4, target on triton, draft on triton, memory fraction 0.85",
    ]


def test_what_does_not_start_is_not_chosen() -> None:
    trials = search(GPU, on(lambda settings: 100.0 if settings == FIRST else 0.0))
    assert choose(trials).settings == FIRST
    failed = report(trials, choose(trials), options(), on_gpu=True)
    assert failed.count("RuntimeError: no such kernel") == 5


def test_noise_does_not_change_the_settings() -> None:
    trials = search(GPU, on(lambda settings: 100.0 if settings == FIRST else 101.0))
    assert choose(trials).settings == FIRST


def test_memory_that_the_load_leaves_free_is_given_to_the_server() -> None:
    trials = search(GPU, on(lambda settings: 100.0, free_gib=9.5))
    # 9.5 GiB of 100 are free, 2 stay so
    assert choose(trials).settings == replace(FIRST, fraction=0.92)
    starved = on(lambda settings: 100.0 if settings.fraction == 0.85 else 0.0, free_gib=9.5)
    assert choose(search(GPU, starved)).settings == FIRST
    assert larger_fraction(Trial(FIRST, {1: 1.0}, 1000, 40.0, 100.0)) == 0.95
    assert larger_fraction(Trial(FIRST, {1: 1.0}, 1000, 2.5, 100.0)) is None


def test_the_launch_line_has_what_was_measured() -> None:
    asked = options("--tp-size", "2", "--trust-remote-code", "--kv-cache-dtype", "fp8_e5m2")
    asked.model_path, asked.speculative_draft_model_path = "a target", "drafter"
    asked.server_args = ["--context-length", "4096"]
    settings = replace(FIRST, width="16", fraction=0.9)
    assert settings.launch_line(asked, on_gpu=True) == (
        "SGLANG_DFLASH_WIDTH=16 python -m sglang.launch_server --model-path 'a target' "
        "--speculative-algorithm DFLASH --speculative-draft-model-path drafter "
        "--speculative-num-draft-tokens 16 --attention-backend triton "
        "--speculative-draft-attention-backend fa4 --mem-fraction-static 0.9 "
        "--swa-full-tokens-ratio 0.8 --tp-size 2 --kv-cache-dtype fp8_e5m2 --trust-remote-code "
        "--context-length 4096"
    )


def test_a_load_that_plain_decoding_serves_as_fast_is_told() -> None:
    trials = search(GPU, on(lambda settings: 40.0))
    assert "serve this load without DFLASH" in report(
        trials, choose(trials), options(), on_gpu=True
    )


def test_a_cpu_has_block_sizes_and_widths_only() -> None:
    plan = make_plan(options(), on_gpu=False)
    assert plan.first == Settings(16) and plan.trials() == 3
    assert default_blocks(16) == [16, 8, 4] and default_blocks(4) == [4, 2]


@pytest.mark.parametrize("block", ["1", "17"])
def test_a_block_that_the_drafter_cannot_draft_is_refused(block: str) -> None:
    with pytest.raises(ValueError, match=f"--blocks {block}: the drafter's block size is 16"):
        make_plan(options("--blocks", block), on_gpu=False)


def test_the_reason_of_a_failed_start_is_its_last_error() -> None:
    log = "the server exited during start-up:\nTraceback\nValueError: too large\n\n[bye] killed\n"
    assert reason(log) == "ValueError: too large"
