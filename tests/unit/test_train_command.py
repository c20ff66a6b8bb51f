"""`python -m sglang_dflash train` at small scale: stages, their outputs, resuming, refusals."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dflash.__main__ import main
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.pairs.tiny_corpus.corpus import sample_prompts
from sglang_dflash.reference.generate import generate_plain
from sglang_dflash.reference.model import FULL, SLIDING, Drafter
from sglang_dflash.testing.server import ROOT
from sglang_dflash.train.answers import answer_files, read_answers

SMALL = (
    f"--model-path={tiny_target()}",
    "--device=cpu",
    "--layers=2",
    "--sliding-window=32",
    "--max-length=160",
    "--max-new-tokens=24",
    "--held-out=3",
    "--tokens-per-batch=480",
    "--anchors=16",
    "--steps=5",
    "--evaluate-prompts=1",
    "--evaluate-tokens=12",
)


def train(*arguments: str | Path) -> int:
    return main(["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three files in the three formats: 8, 3 and 2 prompts."""
    texts = sample_prompts(13, seed=1, split="train")
    folder = tmp_path_factory.mktemp("prompts")
    rows = [json.dumps({"id": i, "prompt": text}) for i, text in enumerate(texts[:8])]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "not the target's"}]
        for text in texts[8:11]
    ]
    rows = [json.dumps({"messages": chat}) for chat in chats]
    (folder / "chats.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "lines.txt").write_text("\n\n".join(t.replace("\n", " ") for t in texts[11:]))
    return [folder / "prompts.jsonl", folder / "chats.jsonl", folder / "lines.txt"]


@pytest.fixture(scope="module")
def out(prompts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a complete run."""
    folder = tmp_path_factory.mktemp("run") / "out"
    assert train(*SMALL, "--prompts", *prompts, "--out", folder, "--licence", "Apache-2.0") == 0
    return folder


def test_a_run_leaves_a_drafter_in_the_released_format(out: Path):
    """If this broke, the trained drafter could not be served."""
    drafter = Drafter.from_pretrained(out / "drafter")
    assert drafter.config.layer_types == (SLIDING, FULL)
    assert drafter.config.sliding_window == 32
    assert drafter.config.mask_token_id == 3
    names = {path.name for path in (out / "drafter").iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md"}


def test_answers_are_the_targets_own_tokens(out: Path):
    """If this broke, the drafter would learn text that the target does not write."""
    answers = read_answers(answer_files(out))
    assert len(answers) == 13
    assert list(answers) == sorted(answers)
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).eval()
    greedy = [a for a in answers.values() if not a.temperature]
    assert all(not a.temperature for a in list(answers.values())[:3]), "held-out ones are greedy"
    for answer in greedy[:4]:
        plain = generate_plain(
            target, answer.prompt_ids.tolist(), max_new_tokens=24, eos_token_ids={2}
        )
        assert answer.answer_ids.tolist() == plain
        assert answer.finish == ("stop" if plain[-1] == 2 else "length")


def test_the_card_says_what_was_done(out: Path, prompts: list[Path]):
    """If this broke, the drafter could not be reproduced, nor its figures trusted."""
    card = (out / "drafter" / "README.md").read_text()
    run = json.loads((out / "run.json").read_text())
    assert [(f["name"], f["rows"]) for f in run["files"]] == [
        ("prompts.jsonl", 8),
        ("chats.jsonl", 3),
        ("lines.txt", 2),
    ]
    for text in (
        *(run["files"][0]["sha256"], "--held-out=3", "Apache-2.0", "5 steps", "| 1 | drawn | 1 |"),
        "a CPU: soft labels, adamw, seed 0.",
    ):
        assert text in card, text
    greedy = sum(not a.temperature for a in read_answers(answer_files(out)).values())
    assert f"Temperatures: 0 ({greedy} answers), " in card
    rows = [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 5
    assert all(row["seconds"] > 0 and row["estimate"] >= 1 for row in rows)


def test_calls_that_share_the_questions_answer_each_once(
    out: Path, prompts: list[Path], tmp_path: Path
):
    """If this broke, work would be done twice or never, or a model card would omit the prompts."""
    answering = (*SMALL, "--prompts", *prompts, "--temperatures", "0", "--stop-after", "answers")
    shares = [tmp_path / "1", tmp_path / "2"]
    for k, share in enumerate(shares, start=1):
        assert train(*answering, "--out", share, "--share", f"{k}/2") == 0
    files = [file for share in shares for file in answer_files(share)]
    found = [read_answers([file]) for file in files]
    assert [len(answers) for answers in found] == [7, 6]
    assert sorted(found[0] | found[1]) == list(read_answers(answer_files(out)))
    joined = tmp_path / "joined"
    assert train(*SMALL, "--answers", *files, "--out", joined, "--steps", "1") == 0
    run, whole = (json.loads((f / "run.json").read_text()) for f in (joined, out))
    assert run["files"] == whole["files"]
    assert run["answers"]["engine"] == whole["answers"]["engine"]
    card = (joined / "drafter" / "README.md").read_text()
    assert all(f"--share {k}/2" in card for k in (1, 2))


def test_the_drafter_can_be_measured_again(out: Path, tmp_path: Path):
    """If this broke, a score could not be checked without training."""
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    before = json.loads((copy / "scores.json").read_text())
    (copy / "scores.json").unlink()
    assert train(*SMALL, "--out", copy, "--evaluate-only") == 0
    after = json.loads((copy / "scores.json").read_text())
    assert after["loops"] == before["loops"]


def test_the_card_of_a_run_that_was_killed_says_so(out: Path, tmp_path: Path):
    """If this broke, a drafter would be credited with steps that it was not trained for."""
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    scores = json.loads((copy / "scores.json").read_text())
    assert scores["share"] == 1 and "of the schedule" not in (out / "drafter/README.md").read_text()
    (copy / "scores.json").write_text(json.dumps(scores | {"step": 3, "share": 0.6}))
    assert train(*SMALL, "--out", copy, "--evaluate-only") == 0
    card = (copy / "drafter" / "README.md").read_text()
    assert "(stopped after 60% of the schedule)" in card
    steps = re.findall(r"^\| [\d.]+ \| (\d+) \| [\d.]+ \| [\d.]+ \|$", card, re.MULTILINE)
    assert steps[-1] == "3"


def test_a_resumed_run_ends_with_the_same_weights(out: Path, tmp_path: Path):
    """If this broke, an interruption would change the result."""
    answers = (*SMALL, "--answers", *answer_files(out), "--stop-after", "train")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(*answers, "--out", whole, "--temperatures", "0.5") == 0
    texts = [
        json.loads((f / "run.json").read_text())["answers"]["temperatures"] for f in (out, whole)
    ]
    assert texts[0] == texts[1], "the answers decide, not what this call would have asked for"
    # pauses at once: one step at a time
    assert train(*answers, "--out", parts, "--pause-after", "1e-9") == 0
    state = torch.load(parts / "checkpoint.pt", weights_only=True)
    assert state["step"] == 1
    assert train(*answers, "--out", parts, "--pause-after", "1e-9", "--resume") == 0
    assert train(*answers, "--out", parts, "--resume") == 0
    one, two = (torch.load(f / "checkpoint.pt", weights_only=True) for f in (whole, parts))
    assert one["step"] == two["step"] == 5
    for name, value in one["module"].items():
        assert torch.equal(value, two["module"][name]), name
    files = [(f / "drafter" / "model.safetensors").read_bytes() for f in (whole, parts)]
    assert files[0] == files[1]


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sglang_dflash", "train", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def stop_once(process: subprocess.Popen[str], number: int, ready: Callable[[], object]) -> str:
    """Send a signal as soon as it is `ready`; return the command that continues the run."""
    while not ready():
        assert process.poll() is None, process.communicate()[1][-4000:]
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 128 + number, error[-4000:]
    assert "Traceback" not in error
    assert f"train: stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}; " in error
    return error.splitlines()[-1]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.long),
    ],
)
def test_a_stopped_training_is_saved_and_says_how_to_go_on(number: int, out: Path, tmp_path: Path):
    """If this broke, stopping would cost everything since the last checkpoint."""
    folder = tmp_path / "a folder"
    given = (*SMALL, "--answers", *answer_files(out), "--out", folder, "--stop-after", "train")
    process = start(*given, "--steps", "60")
    # written after the first step
    command = stop_once(process, number, (folder / "progress.jsonl").exists)
    step = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
    assert 1 <= step < 60
    assert json.loads((folder / "scores.json").read_text())["step"] == step
    assert command.endswith(" --steps 60 --resume")
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"train: resumed at step {step}, " in done.stdout
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] == 60


def test_answers_that_were_complete_outlast_a_signal(tmp_path: Path):
    """If this broke, an hour of answers could be lost, or a resumed run could have others."""
    path = tmp_path / "prompts.jsonl"
    texts = sample_prompts(160, seed=3, split="train")
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    given = (*SMALL, "--prompts", path, "--stop-after", "answers", "--out")
    folder, whole = tmp_path / "out", tmp_path / "whole"
    process = start(*given, folder)
    # a file exists for a moment before its first group is in it
    command = stop_once(
        process, signal.SIGINT, lambda: any(f.stat().st_size for f in answer_files(folder))
    )
    kept = read_answers(answer_files(folder))
    assert 16 <= len(kept) < 160
    assert command.endswith(f" --out {folder} --resume")
    assert train(*given, folder, "--resume") == 0
    assert train(*given, whole) == 0
    found, expected = (read_answers(answer_files(f)) for f in (folder, whole))
    assert len(expected) == 160
    assert found == expected
    assert kept.items() <= found.items()


REFUSALS = {
    "mask": (["--mask-token-id", "1024"], "outside the target's vocabulary of 1024"),
    "layers": (["--target-layer-ids", "1", "7"], "must lie in 0..6 for a target of 8 layers"),
    "thinking": (["--thinking", "on"], "does not use enable_thinking"),
    "length": (["--max-length", "4096", "--tokens-per-batch", "4096"], "2048 positions"),
    "batch": (["--tokens-per-batch", "100"], "cannot hold one sequence of --max-length 160"),
    "gamma": (["--gamma", "5"], "Add --loss decay, or drop --gamma"),
    "temperatures": (["--temperatures", "hot"], "Write TEMPERATURE or TEMPERATURE:SHARE"),
    "share": (["--share", "3/2"], "--share is '3/2'. Write K/N with K from 1 to N"),
    "steps": (["--steps", "0"], "--steps is 0. Pass a finite number above 0."),
    "held out": (["--held-out", "13"], "13 answers to 13 prompts were found and --held-out is 13"),
    "target": (["--model-path", str(Path(__file__).parent)], "(a folder) has no model"),
    "evaluate": (["--evaluate-only"], "--evaluate-only found no drafter"),
    "two shapes": (
        ["--init-from", str(tiny_drafter())],
        "the drafter's shape is fixed. Drop --layers, --sliding-window.",
    ),
}


SMALL_SHAPE = ("--layers=2", "--sliding-window=32")


UNSHAPED = tuple(argument for argument in SMALL if argument not in SMALL_SHAPE)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_with_the_reason(
    name: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """If this broke, a mistake would only show after an hour of generation."""
    arguments, reason = REFUSALS[name]
    given = (*SMALL, "--answers", *answer_files(out), "--out", tmp_path / "out", *arguments)
    assert train(*given) == 2
    assert reason in capsys.readouterr().err


def test_a_drafter_is_trained_further_from_its_own_weights(out: Path, tmp_path: Path):
    """If this broke, a released drafter could not be fine-tuned on a user's own text."""
    answers, folder = answer_files(out), tmp_path / "out"
    given = ("--answers", *answers, "--init-from", tiny_drafter(), "--learning-rate", "1e-5")
    assert train(*UNSHAPED, *given, "--out", folder, "--steps", "2") == 0
    before, after = (Drafter.from_pretrained(d) for d in (tiny_drafter(), folder / "drafter"))
    assert after.config == before.config
    was, now = (torch.cat([p.flatten() for p in d.parameters()]) for d in (before, after))
    assert 0 < (now - was).norm() < 0.01 * was.norm()
    card = (folder / "drafter" / "README.md").read_text()
    assert f"--init-from {tiny_drafter()}" in card
    assert f"From the drafter {tiny_drafter()}: " in card


def test_what_cannot_be_trained_further_is_refused(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other, causal = tmp_path / "other", tmp_path / "causal"
    other.mkdir()
    causal.mkdir()
    raw = json.loads((tiny_drafter() / "config.json").read_text())
    reasons = {
        "no/such/drafter": "is neither a folder nor a model that can be downloaded",
        str(tmp_path): "has no config.json. Pass a drafter's folder.",
        str(tiny_target()): "it is not a DFlash drafter",
        str(other): "for another target: hidden_size is 64 but the target's is 128",
        str(causal): "does not support: is_causal True",
    }
    (other / "config.json").write_text(json.dumps(raw | {"hidden_size": 64}))
    (causal / "config.json").write_text(json.dumps(raw | {"is_causal": True}))
    for name, reason in reasons.items():
        given = ("--answers", *answer_files(out), "--init-from", name, "--out", tmp_path / "out")
        assert train(*UNSHAPED, *given) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"question": "Hi"}\n', "line 1 has ['question']. Each line needs `prompt`"),
        ('{"prompt": "Hi"}\nHi\n', "line 2 is not JSON"),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}\n', "line 1 has no user turn"),
        ("", "broken.jsonl, which is empty. Write one prompt per line"),
    ],
    ids=["field", "json", "turn", "empty"],
)
def test_broken_prompt_files_are_refused_by_line(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    assert train(*SMALL, "--prompts", path, "--out", tmp_path / "out") == 2
    assert reason in capsys.readouterr().err


def test_too_few_prompts_are_refused_before_any_is_answered(
    prompts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """If this broke, all answers would be generated in vain and get in the way of the next call."""
    given = (*SMALL, "--prompts", *prompts, "--out", tmp_path)
    assert train(*given, "--held-out", "13") == 2
    assert "13 prompts (0 repeated and 0 too long left out) and --held-out is 13" in (
        capsys.readouterr().err
    )
    assert not answer_files(tmp_path)
    assert train(*given, "--held-out", "12", "--stop-after", "answers") == 0
    assert len(read_answers(answer_files(tmp_path))) == 13


def test_a_target_without_chat_template_is_refused(tmp_path: Path, capsys):
    target = tmp_path / "target"
    shutil.copytree(tiny_target(), target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    arguments = ("--model-path", target, "--prompts", "x.txt", "--out", tmp_path / "out")
    assert train(*SMALL, *arguments) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_a_folder_that_holds_another_run_is_not_overwritten(out: Path, capsys):
    """If this broke, a typo could cost a trained drafter."""
    assert train(*SMALL, "--out", out) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert train(*SMALL, "--out", out, "--resume", "--anchors", "17") == 2
    assert "anchors was 16, now 17" in capsys.readouterr().err
