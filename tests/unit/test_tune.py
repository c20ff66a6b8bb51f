"""`tune`: what is tried, and what is chosen, on machines that these tests make up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dflash.__main__ import make_parser
from sglang_dflash.commands import tune
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
from sglang_dflash.config import DrafterSpec
from sglang_dflash.draft_backends import Place
from sglang_dflash.pairs import tiny_drafter, tiny_target

FIRST = Settings(16, "auto", "triton", "fa4", 0.85)
GPU = Plan(FIRST, ("fa4", "triton"), ("triton", None), (16, 8, 4), ("auto", "full"))

DRAFTER = DrafterSpec.from_config(
    json.loads((tiny_drafter() / "config.json").read_text()), name="tiny"
)


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
    asked.speculative_draft_kv_cache_dtype = "bf16"
    asked.model_path, asked.speculative_draft_model_path = "a target", "drafter"
    asked.server_args = ["--context-length", "4096"]
    settings = replace(FIRST, width="full", fraction=0.9)
    assert settings.launch_line(asked, on_gpu=True) == (
        "SGLANG_DFLASH_WIDTH=16 python -m sglang.launch_server --model-path 'a target' "
        "--speculative-algorithm DFLASH --speculative-draft-model-path drafter "
        "--speculative-num-draft-tokens 16 --attention-backend triton "
        "--speculative-draft-attention-backend fa4 --mem-fraction-static 0.9 "
        "--swa-full-tokens-ratio 0.8 --tp-size 2 --kv-cache-dtype fp8_e5m2 "
        "--speculative-draft-kv-cache-dtype bf16 --trust-remote-code "
        "--context-length 4096"
    )


def test_a_load_that_plain_decoding_serves_as_fast_is_told() -> None:
    trials = search(GPU, on(lambda settings: 40.0))
    assert "serve this load without DFLASH" in report(
        trials, choose(trials), options(), on_gpu=True
    )


def test_acceptance_stands_beside_the_speed() -> None:
    """Low acceptance on a user's own text is the usual reason for a small gain."""
    plain = Trial(replace(FIRST, block=1), {1: 50.0, 8: 200.0})
    ours = Trial(FIRST, {1: 80.0, 8: 300.0}, accept_length=3.456)
    title, *lines = report([plain, ours], ours, options(), on_gpu=True).splitlines()
    assert title.split()[-2:] == ["accept", "length"]
    assert [line.split()[-1] for line in lines[:2]] == ["200.0", "3.46"]
    assert len(lines[1]) == len(title)


def test_a_cpu_has_block_sizes_and_widths_only() -> None:
    plan = make_plan(options(), on_gpu=False)
    assert plan.first == Settings(16) and plan.trials() == 3
    assert default_blocks(16) == [16, 8, 4] and default_blocks(4) == [4, 2]


def test_a_width_that_was_left_out_is_neither_measured_nor_recommended() -> None:
    """With `full` alone, each block is verified at its own width from the first trial on."""
    plan = make_plan(options("--widths", "full", "--blocks", "16", "8"), on_gpu=False)
    trials = search(plan, on(lambda settings: 100.0 + 50 * (settings.block == 8)))
    assert [str(trial.settings) for trial in trials] == [
        "plain decoding",
        "block size 16, width 16",
        "block size 8, width 8",
    ]
    environments = [trial.settings.environment() for trial in trials]
    assert environments == [{}, {"SGLANG_DFLASH_WIDTH": "16"}, {"SGLANG_DFLASH_WIDTH": "8"}]
    assert choose(trials) is trials[2]


def test_nothing_is_measured_twice() -> None:
    twice = options("--blocks", "16", "8", "8", "--widths", "full", "auto", "full")
    trials = search(make_plan(twice, on_gpu=False), on(lambda settings: 100.0))
    names = [str(trial.settings) for trial in trials]
    assert names == ["plain decoding", "block size 16", "block size 8", "block size 16, width 16"]


def test_arguments_of_a_gpu_are_passed_on_to_a_cpu_if_they_were_given() -> None:
    settings = Settings(16)
    asked = options("--tp-size", "2", "--mem-fraction-static", "0.6")
    asked.swa_full_tokens_ratio = 0.5
    given = ["--mem-fraction-static", "0.6", "--swa-full-tokens-ratio", "0.5", "--tp-size", "2"]
    assert settings.arguments(asked, on_gpu=False)[-6:] == given
    assert not {"--tp-size", *given} & set(settings.arguments(options(), on_gpu=False))


def test_a_gpu_has_its_defaults_by_name() -> None:
    plan = Plan.of(DRAFTER, Place("cuda", (9, 0), is_fp32=False), options())
    words = plan.first.arguments(options(), on_gpu=True)
    shown = " ".join(words)
    assert "--mem-fraction-static 0.85 --swa-full-tokens-ratio 0.8 --tp-size 1" in shown


@pytest.mark.parametrize(
    ("name", "told"), [("nowhere/out.json", "cannot be written: there is no"), (".", "is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_first_trial(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    told: str,
) -> None:
    def no_trial(*_: object) -> Trial:
        raise AssertionError("a trial was begun")

    monkeypatch.setattr(tune, "try_settings", no_trial)
    asked = options("--out", str(tmp_path / name))
    assert tune.run_tune(asked) == 1
    assert f"tune: --out {tmp_path / name} {told}" in capsys.readouterr().err


class Idle:
    """A server that is there, and has nothing to say."""

    url = "http://127.0.0.1:1"

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_card_that_does_not_tell_its_memory_fails_one_trial_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another trial's settings may leave the card in order, and those before are not lost."""
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "ServerProcess", Idle)
    monkeypatch.setattr(tune, "rate", lambda *_: 100.0)
    # what the other process prints before it ends
    monkeypatch.setattr(tune, "FREE_MEMORY", "raise RuntimeError('CUDA error: unknown')#{ranks}")
    trial = tune.try_settings(FIRST, [], options())
    assert trial.error == "RuntimeError: CUDA error: unknown" and trial.score == 0


@pytest.mark.parametrize(
    ("seconds", "rounds", "told"),
    [
        # of each round; all further ones take as long as the last
        ([4.0, 4.02], 2, ""),
        ([0.5], 6, ""),
        ([1.0, 0.9, 0.8, 0.7, 0.7], 5, ""),
        ([30.0, 20.0], 2, "1 requests: the two fastest of 2 rounds are 33% apart"),
        ([2.0, *(2.0 * 0.95**k for k in range(1, 40))], 14, "rounds are 5% apart"),
    ],
    ids=["steady", "short", "warming up", "slow", "never steady"],
)
def test_rounds_go_on_until_two_agree(
    seconds: list[float],
    rounds: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fast card answers all questions in a second, of which any pause is a large part."""
    now, rounds_begun = 0.0, 0

    class Server(Idle):
        url = "http://127.0.0.1:1"

        def flush_cache(self) -> None:
            nonlocal rounds_begun
            rounds_begun += 1

    def ask(*_: object) -> int:
        nonlocal now
        now += seconds[min(rounds_begun, len(seconds)) - 1] / tune.FEWEST_QUESTIONS
        return 10

    monkeypatch.setattr(tune.time, "monotonic", lambda: now)
    monkeypatch.setattr(tune, "ask", ask)
    rate = tune.rate(Server(), [[]], 1, 128)  # type: ignore[arg-type]
    assert rounds_begun == rounds
    fastest = min(seconds[:rounds])
    assert rate == pytest.approx(10 * tune.FEWEST_QUESTIONS / fastest)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("block", ["1", "17"])
def test_a_block_that_the_drafter_cannot_draft_is_refused(block: str) -> None:
    with pytest.raises(ValueError, match=f"--blocks {block}: the drafter's block size is 16"):
        make_plan(options("--blocks", block), on_gpu=False)


def test_the_reason_of_a_failed_start_is_its_last_error() -> None:
    log = "the server exited during start-up:\nTraceback\nValueError: too large\n\n[bye] killed\n"
    assert reason(log) == "ValueError: too large"
