"""The launch recipes: what they would run, and what they report before anything is loaded."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.commands.card_names import BY_SIZE, CARDS
from sglang_dflash.commands.card_plan import offers
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.testing.server import ROOT

LAUNCH = ROOT / "launch"
OTHERS = ("serve.sh", "cpu.sh", "router.sh", "pd.sh")
RECIPES = sorted(path.name for path in LAUNCH.glob("*.sh") if path.name not in OTHERS)


def run(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LAUNCH / script), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "DRY_RUN": "1", **env},
        capture_output=True,
        text=True,
        timeout=600,
    )


PAIR = (str(tiny_target()), str(tiny_drafter()))


def test_a_pair_is_launched_with_what_was_passed_on() -> None:
    shown = run("serve.sh", *PAIR, "--tp-size", "1")
    assert shown.returncode == 0, shown.stderr
    assert f"--speculative-draft-model-path {PAIR[1]}" in shown.stdout
    assert "--attention-backend triton" in shown.stdout and "--port 30000" in shown.stdout
    assert shown.stdout.strip().endswith("--tp-size 1")
    # the server chooses it by the card
    assert "--speculative-draft-attention-backend" not in shown.stdout


def test_the_command_is_shown_as_a_shell_reads_it() -> None:
    shown = run("serve.sh", "/a folder/target", "it's", "--served-model-name", "my model")
    words = shlex.split(shown.stdout)
    assert words[words.index("--model-path") + 1] == "/a folder/target"
    assert words[words.index("--speculative-draft-model-path") + 1] == "it's"
    assert words[-1] == "my model"


def test_a_repository_runs_no_code_of_its_own_unless_asked_to() -> None:
    assert "--trust-remote-code" not in run("serve.sh", *PAIR).stdout
    assert "--trust-remote-code" in run("serve.sh", *PAIR, "--trust-remote-code").stdout


@pytest.mark.parametrize(
    ("script", "plain"), [("serve.sh", "0"), ("serve.sh", "1"), ("cpu.sh", "0")]
)
def test_a_python_without_sglang_is_refused_in_one_sentence(
    tmp_path: Path, script: str, plain: str
) -> None:
    bare = tmp_path / "python"
    # no site-packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    given = PAIR if script == "serve.sh" else ()
    done = run(script, *given, DRY_RUN="0", PLAIN=plain, PYTHON=str(bare))
    assert done.returncode == 1
    assert "has no torch and no sglang and no sglang_dflash. Install" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    gone = run(script, *given, DRY_RUN="0", PYTHON="/no/python")
    assert gone.returncode == 1 and "no Python at /no/python" in gone.stderr


def test_plain_leaves_speculation_out() -> None:
    shown = run("serve.sh", *PAIR, PLAIN="1")
    assert shown.returncode == 0
    assert "speculative" not in shown.stdout and "attention-backend" not in shown.stdout


def test_sglangs_own_dflash_picks_its_backends() -> None:
    shown = run("serve.sh", *PAIR, SGLANG_DFLASH="off")
    assert shown.returncode == 0
    assert "--speculative-algorithm DFLASH" in shown.stdout
    assert "attention-backend" not in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PAIR[0],), "needs TARGET and DRAFTER"),
        pytest.param((PAIR[0], "/nowhere"), "/nowhere cannot be read", marks=pytest.mark.long),
        ((PAIR[0], str(ROOT / "benchmarks/shapes/gemma4-31b-draft")), "hidden"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments: tuple[str, ...], message: str) -> None:
    shown = run("serve.sh", *arguments, DRY_RUN="0")
    assert shown.returncode != 0
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("env", "added"),
    [
        ({}, ""),
        ({"TP": "2"}, "--tp-size 2"),
        ({"DP": "4"}, "--dp-size 4"),
        ({"TP": "2", "DP": "2"}, "--tp-size 2 --dp-size 2"),
        (
            {"TP": "16", "NODES": "2", "NODE_RANK": "1", "MASTER": "10.0.0.1:25000"},
            "--tp-size 16 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:25000",
        ),
    ],
    ids=["one", "tp", "dp", "tp and dp", "nodes"],
)
def test_several_cards_are_asked_for_by_name(env: dict[str, str], added: str) -> None:
    """A recipe passes them on, for plain decoding as well."""
    for plain in ("0", "1"):
        shown = run("qwen3-8b.sh", TARGET=PAIR[0], DRAFTER=PAIR[1], PLAIN=plain, **env)
        assert shown.returncode == 0, shown.stderr
        before, _, after = shown.stdout.partition("--swa-full-tokens-ratio 0.8 ")
        assert before and after.startswith(f"{added} --port 30000".strip())


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TP": "two"}, "TP=two is not a number of GPUs"),
        ({"DP": "0"}, "DP=0 is not a number of GPUs"),
        ({"NODES": "2", "DP": "2"}, "DP=2 with NODES=2: SGLang runs replicas on one machine only"),
        ({"NODES": "2", "TP": "3"}, "TP=3 is not a multiple of NODES=2"),
        ({"NODES": "2", "TP": "2"}, "needs MASTER=host:port"),
        ({"NODES": "2", "TP": "2", "MASTER": "node0"}, "and found MASTER=node0"),
        (
            {"NODES": "2", "TP": "2", "MASTER": "n:1"},
            "NODE_RANK=0 to 1, a different one on",
        ),
        (
            {"NODES": "2", "TP": "2", "MASTER": "n:1", "NODE_RANK": "2"},
            "but found NODE_RANK=2.",
        ),
    ],
)
def test_cards_that_cannot_be_are_refused_in_one_sentence(
    env: dict[str, str], message: str
) -> None:
    shown = run("serve.sh", *PAIR, **env)
    assert shown.returncode == 2 and shown.stdout == ""
    assert message in shown.stderr and len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_names_a_pair_and_takes_another(recipe: str) -> None:
    text = Path(LAUNCH / recipe).read_text()
    assert "z-lab/" in text
    shown = run(recipe, "--tp-size", "1", TARGET=PAIR[0], DRAFTER=PAIR[1])
    assert shown.returncode == 0, shown.stderr
    assert f"--model-path {PAIR[0]}" in shown.stdout and "--tp-size 1" in shown.stdout


def test_there_is_a_recipe_for_each_released_pair() -> None:
    assert RECIPES == [
        "gemma4-26b-a4b-32gb.sh",
        "gemma4-26b-a4b.sh",
        "gemma4-31b-32gb.sh",
        "gemma4-31b.sh",
        "gpt-oss-20b.sh",
        "llama-3.1-8b.sh",
        "qwen3-4b.sh",
        "qwen3-8b-24gb.sh",
        "qwen3-8b.sh",
        "qwen3-coder-30b-a3b.sh",
    ]


def options_of(words: list[str]) -> dict[str, str]:
    """Return the options of a command, each of which has a value."""
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    names, values = words[first::2], words[first + 1 :: 2]
    assert all(name.startswith("--") for name in names)
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize(
    "recipe", ["gemma4-31b-32gb.sh", "gemma4-26b-a4b-32gb.sh", "qwen3-8b-24gb.sh"]
)
def test_a_recipe_for_a_small_card_is_what_the_plan_offers_for_it(recipe: str) -> None:
    """So the plan says that it fits."""
    size = int(recipe.removesuffix("gb.sh").rpartition("-")[2])
    card = CARDS[BY_SIZE[size]]
    found = offers(card.gib, card.capability)
    offer = next(each for each in found if each.recipe == f"launch/{recipe}")
    shown = run(recipe, TARGET="", DRAFTER="")
    given, planned = options_of(shlex.split(shown.stdout)), options_of(offer.arguments())
    # the server takes it from the drafter
    del planned["--speculative-num-draft-tokens"]
    assert given == planned | {"--port": "30000"}


def test_another_target_says_itself_how_it_is_quantised() -> None:
    shown = run("gemma4-26b-a4b-32gb.sh", TARGET=PAIR[0], DRAFTER=PAIR[1])
    assert "--quantization" not in shown.stdout
    assert "--quantization" in run("gemma4-26b-a4b-32gb.sh").stdout


def test_a_recipe_prepares_a_checkpoint_that_sglang_cannot_load(tmp_path: Path) -> None:
    """With the folder that `plain-towers` prints as the target."""
    stub = tmp_path / "python"
    stub.write_text(
        '#!/bin/sh\ncase "$*" in\n*plain-towers*) echo "/made/for $4" ;;\n*) echo "$@" ;;\nesac\n'
    )
    stub.chmod(0o755)
    done = run("gemma4-31b-32gb.sh", DRY_RUN="0", PYTHON=str(stub))
    assert done.returncode == 0, done.stderr
    target = "--model-path /made/for google/gemma-4-31B-it-qat-w4a16-ct --mem"
    assert target in done.stdout.splitlines()[-1]
