"""The recipes: what they would run, and what they say before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server import ROOT
from sglang_dflash.pairs import tiny_drafter, tiny_target

LAUNCH = ROOT / "launch"
RECIPES = sorted(
    path.name for path in LAUNCH.glob("*.sh") if path.name not in ("serve.sh", "cpu.sh")
)


def run(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LAUNCH / script), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "DRY_RUN": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


PAIR = (str(tiny_target()), str(tiny_drafter()))


def test_a_pair_is_launched_with_what_was_passed_on() -> None:
    shown = run("serve.sh", *PAIR, "--tp-size", "1")
    assert shown.returncode == 0, shown.stderr
    assert f"--speculative-draft-model-path {PAIR[1]}" in shown.stdout
    assert "--attention-backend triton" in shown.stdout and "--port 30000" in shown.stdout
    assert shown.stdout.strip().endswith("--tp-size 1")


def test_plain_leaves_speculation_out() -> None:
    shown = run("serve.sh", *PAIR, PLAIN="1")
    assert shown.returncode == 0
    assert "speculative" not in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PAIR[0],), "needs TARGET and DRAFTER"),
        ((PAIR[0], "/nowhere"), "/nowhere cannot be read"),
        ((PAIR[0], str(ROOT / "benchmarks/shapes/gemma4-31b-draft")), "hidden"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments: tuple[str, ...], message: str) -> None:
    shown = run("serve.sh", *arguments, DRY_RUN="0")
    assert shown.returncode != 0
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_names_a_pair_and_takes_another(recipe: str) -> None:
    text = Path(LAUNCH / recipe).read_text()
    assert "z-lab/" in text
    shown = run(recipe, "--tp-size", "1", TARGET=PAIR[0], DRAFTER=PAIR[1])
    assert shown.returncode == 0, shown.stderr
    assert f"--model-path {PAIR[0]}" in shown.stdout and "--tp-size 1" in shown.stdout


def test_there_is_a_recipe_for_each_released_pair() -> None:
    assert RECIPES == [
        "gemma4-26b-a4b.sh",
        "gemma4-31b.sh",
        "llama-3.1-8b.sh",
        "qwen3-4b.sh",
        "qwen3-8b.sh",
        "qwen3-coder-30b-a3b.sh",
    ]
