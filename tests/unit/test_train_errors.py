"""A training run that cannot go on: one line that says why, whichever stage it had reached."""

from __future__ import annotations

import gzip
import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sglang_dflash.pairs import tiny_target
from sglang_dflash.train.answers import Answer, answer_files, append_answers
from tests.unit.test_train_command import SMALL, train


def make_answers(folder: Path, *, tokens: int = 20) -> Path:
    """Write a file with one answer to each of six prompts; return its path."""
    folder.mkdir(exist_ok=True)
    ids = array("i", range(50, 50 + tokens))
    append_answers(
        folder,
        [Answer(f"{n}.0", 0.0, "stop", array("i", [40 + n] * 5), ids) for n in range(6)],
    )
    [path] = answer_files(folder)
    return path


def copy_target(folder: Path) -> Path:
    """Copy the tiny target to `folder`."""
    shutil.copytree(tiny_target(), folder)
    return folder


def reason(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must fail; return its last line, which says why."""
    capsys.readouterr()
    assert train(*SMALL, *arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("train: ")
    return last


def test_an_out_that_cannot_be_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, taken = make_answers(tmp_path / "answers"), tmp_path / "taken"
    taken.write_text("not a folder")
    for out in (taken, taken / "below"):
        found = reason(capsys, "--answers", answers, "--out", out)
        assert f"--out {out} cannot be made a folder" in found


def test_answers_that_are_no_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "missing.jsonl.gz", tmp_path):
        found = reason(capsys, "--answers", path, "--out", tmp_path / "out")
        assert f"--answers names {path}, which is not a file." in found


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"key":"a.0","prompt_ids":[4294967296],"answer_ids":[5]}\n', id="large id"),
        pytest.param(b'{"key":"\xff"}\n', id="not UTF-8"),
        pytest.param(b'{"text":"Hi"}\n', id="fields"),
    ],
)
def test_a_file_that_holds_no_answers_is_named(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers-000.jsonl.gz"
    path.write_bytes(gzip.compress(content))
    found = reason(capsys, "--answers", path, "--out", tmp_path / "out")
    assert f"{path} is not a file of answers" in found
    assert "Pass files that `train` wrote" in found


def test_answers_without_anything_to_draft_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_answers(tmp_path / "answers", tokens=1)
    found = reason(capsys, "--answers", path, "--out", tmp_path / "out")
    assert "none of the 3 answers to train on has two tokens within --max-length 160" in found


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_prompts_that_are_not_text_are_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b'{"prompt": "Hi"}\n'))
    found = reason(capsys, "--prompts", path, "--out", tmp_path / "out")
    assert f"--prompts names {path}, which is not UTF-8 text" in found
    assert "one prompt per line" in found


def test_a_prompt_that_the_chat_template_refuses_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, path = copy_target(tmp_path / "target"), tmp_path / "prompts.jsonl"
    template = "{% if 'rude' in messages[0].content %}{{ raise_exception('Be kind.') }}{% endif %}"
    settings = json.loads((target / "tokenizer_config.json").read_text())
    changed = settings | {"chat_template": template + "{{ messages[0].content }}"}
    (target / "tokenizer_config.json").write_text(json.dumps(changed))
    path.write_text('{"prompt": "Hi"}\n{"prompt": "Something rude"}\n')
    found = reason(
        capsys, "--model-path", target, "--prompts", path, "--out", tmp_path / "out", "--held-out=1"
    )
    assert f"{path}, prompt 2: the chat template of {target} cannot format it (Be kind.)" in found


def test_a_target_without_layers_to_read_is_refused_before_it_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, path, out = copy_target(tmp_path / "target"), tmp_path / "lines.txt", tmp_path / "out"
    config = GPT2Config(vocab_size=1024, n_embd=32, n_layer=4, n_head=2, n_positions=256)
    GPT2LMHeadModel(config).save_pretrained(target)
    path.write_text("\n".join(f"Hello {n}" for n in range(5)))
    found = reason(capsys, "--model-path", target, "--prompts", path, "--out", out)
    assert "GPT2LMHeadModel has no list of 4 layers to take features from." in found
    assert not answer_files(out)


def test_a_target_without_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, answers = copy_target(tmp_path / "target"), make_answers(tmp_path / "answers")
    (target / "model.safetensors").unlink()
    found = reason(capsys, "--model-path", target, "--answers", answers, "--out", tmp_path / "out")
    assert str(target) in found


def test_a_run_that_broke_does_not_overwrite_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this broke, one bad step would cost everything before it."""
    out = tmp_path / "out"
    given = ("--answers", make_answers(tmp_path / "answers"), "--out", out)
    assert train(*SMALL, *given, "--pause-after", "1e-9") == 0
    before = (out / "checkpoint.pt").read_bytes()
    found = reason(capsys, *given, "--resume", "--learning-rate", "1e30")
    assert "Lower --learning-rate 1e+30 and pass --resume: the last checkpoint was kept" in found
    assert (out / "checkpoint.pt").read_bytes() == before


def test_weights_that_broke_in_the_last_step_do_not_overwrite_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of a step is that of the weights before it, so a finite one says nothing of them."""
    out = tmp_path / "out"
    given = ("--answers", make_answers(tmp_path / "answers"), "--out", out, "--pause-after=1e-9")
    assert train(*SMALL, *given) == 0
    kept = (out / "checkpoint.pt", out / "drafter" / "model.safetensors", out / "scores.json")
    before = [path.read_bytes() for path in kept]
    found = reason(capsys, *given, "--resume", "--learning-rate", "1e300")
    assert "the drafter has weights that are not finite after step 2. Lower" in found
    assert "pass --resume: the last checkpoint was kept" in found
    assert [path.read_bytes() for path in kept] == before


def test_a_run_that_broke_before_its_first_checkpoint_promises_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this broke, a user would look for a checkpoint that was never written."""
    out = tmp_path / "out"
    given = ("--answers", make_answers(tmp_path / "answers"), "--out", out)
    found = reason(capsys, *given, "--learning-rate", "1e30")
    assert "the loss is nan at step 5" in found
    assert "pass --resume: there is no checkpoint yet, so training begins again." in found
    assert train(*SMALL, *given, "--resume") == 0


def cut(path: Path) -> Path:
    """Cut a file in half, as a full disk does."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def test_a_cut_record_of_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If this broke, only a decoder's position would tell which of the files is damaged."""
    out = tmp_path / "out"
    given = ("--answers", make_answers(tmp_path / "answers"), "--out", out)
    assert train(*SMALL, *given, "--pause-after", "1e-9") == 0
    path = cut(out / "run.json")
    found = reason(capsys, *given, "--resume")
    assert f"{path} is not the JSON object that `train` wrote" in found


def test_the_record_beside_answers_is_named_if_it_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = make_answers(tmp_path / "answers")
    beside = tmp_path / "answers" / "run.json"
    beside.write_text('{"settings": {"model')
    found = reason(capsys, "--answers", answers, "--out", tmp_path / "out")
    assert f"{beside} is not the JSON object that `train` wrote" in found


def pause(folder: Path) -> tuple[Path, tuple[str | Path, ...]]:
    """Begin a run and pause it; return its folder, and the arguments that it goes on with."""
    out = folder / "out"
    given = ("--answers", make_answers(folder / "answers"), "--out", out)
    assert train(*SMALL, *given, "--pause-after", "1e-9") == 0
    return out, given


def test_progress_that_is_missing_or_cut_is_named_with_a_way_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, given = pause(tmp_path)
    path = out / "progress.jsonl"
    cut(path)
    found = reason(capsys, *given, "--resume")
    assert f"{path}, line 1 is not a JSON object" in found and "Remove that line" in found
    path.unlink()
    found = reason(capsys, *given, "--resume")
    assert f"{path} is missing" in found and "empty file" in found
    path.touch()
    assert train(*SMALL, *given, "--resume") == 0


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_text(path: Path) -> None:
    path.write_text("not a checkpoint\n" * 100)


def drop_the_module(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "module": {}}, path)


def drop_the_seconds(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    del state["seconds"]
    torch.save(state, path)


@pytest.mark.parametrize("damage", [cut, empty, replace_by_text, drop_the_module, drop_the_seconds])
def test_a_damaged_checkpoint_is_named_with_a_way_to_go_on(
    damage: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this broke, torch's traceback would advise to load the file without its checks."""
    out, given = pause(tmp_path)
    path = out / "checkpoint.pt"
    damage(path)
    found = reason(capsys, *given, "--resume")
    assert f"{path} is not a whole checkpoint of this run (" in found
    assert found.endswith(
        "Delete it and pass --resume to begin training again, or pass another --out folder."
    )
    assert "weights_only" not in found and len(found) - len(str(path)) < 320
    path.unlink()
    assert train(*SMALL, *given, "--resume") == 0
