"""Talks in the trainer's prompts: later turns are asked after the target's own answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.pairs import tiny_target
from sglang_dflash.pairs.tiny_corpus.corpus import sample_prompts
from sglang_dflash.reference.generate import generate_plain
from sglang_dflash.train import follow_ups
from sglang_dflash.train.answers import Answer, answer_files, append_answers, read_answers
from sglang_dflash.train.batches import encode_prompt
from sglang_dflash.train.prompts import read_chats, read_prompts
from sglang_dflash.train.turns import is_later, prompt_key
from tests.unit.test_train_command import SMALL, train

LATER = ("Who told you?", "And then?")
ANSWERS = ("--stop-after=answers", "--max-new-tokens=90", "--max-length=250", "--temperatures=0:1")


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten talks of three turns, and two single questions."""
    texts = sample_prompts(12, seed=4, split="train")
    rows = [{"turns": [text, *LATER]} for text in texts[:5]]
    rows += [{"prompt": text, "later": list(LATER)} for text in texts[5:10]]
    rows += [{"prompt": text} for text in texts[10:]]
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def out(talks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that ended after the answers."""
    folder = tmp_path_factory.mktemp("run") / "out"
    assert train(*SMALL, *ANSWERS, "--prompts", talks, "--out", folder) == 0
    return folder


def answers_in(folder: Path) -> dict[str, Answer]:
    return read_answers(answer_files(folder))


def test_a_later_turn_follows_the_targets_own_answer(out: Path) -> None:
    """With another's answers in it, the chat would be one that the target never has."""
    found = answers_in(out)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).eval()
    later = [key for key in found if is_later(key)]
    assert {key.rpartition(".")[2] for key in later} == {"1", "2"}
    for key in later:
        talk, _, number = key.rpartition(".")
        messages = []
        before = [found[f"{talk}.{n}" if n else talk] for n in range(int(number))]
        first = tokenizer.decode(before[0].prompt_ids.tolist())
        for n, answer in enumerate(before):
            assert answer.finish == "stop"
            said = tokenizer.decode(answer.answer_ids.tolist(), skip_special_tokens=True)
            messages += [{"role": "assistant", "content": said}]
            messages += [{"role": "user", "content": LATER[n]}]
        shown = tokenizer.decode(found[key].prompt_ids.tolist())
        assert shown.startswith(first)
        # what the template makes of the turns after the first question
        asked = [{"role": "user", "content": "?"}, *messages]
        tail = tokenizer.decode(encode_prompt(tokenizer, asked)).partition("?")[2]
        assert shown.endswith(tail)
    plain = generate_plain(
        target, found[later[0]].prompt_ids.tolist(), max_new_tokens=90, eos_token_ids={2}
    )
    assert found[later[0]].answer_ids.tolist() == plain


def test_held_out_prompts_and_unfinished_answers_end_a_talk(out: Path) -> None:
    """What is asked after a held-out prompt would be trained on."""
    found = answers_in(out)
    held_out = sorted({prompt_key(key) for key in found})[:3]
    assert not [key for key in found if is_later(key) and prompt_key(key) in held_out]
    for key in found:
        if is_later(key):
            talk, _, number = key.rpartition(".")
            before = talk if number == "1" else f"{talk}.{int(number) - 1}"
            assert found[before].finish == "stop"


def test_all_turns_are_counted(out: Path) -> None:
    found = answers_in(out)
    noted = json.loads((out / "run.json").read_text())["answers"]
    assert noted["later_turns"] == sum(map(is_later, found)) > 0
    assert noted["count"] == len(found)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_resumed_run_asks_for_what_is_missing(
    turns: int, out: Path, talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted within a turn, it must end with the same answers."""
    found = answers_in(out)
    again = tmp_path / "out"
    shutil.copytree(out, again)
    for file in answer_files(again):
        file.unlink()
    kept = [key for key in found if turn_of(key) < turns]
    # and every other one of this turn
    kept += [key for key in found if turn_of(key) == turns][::2]
    append_answers(again, [found[key] for key in kept])
    resume = [*SMALL, *ANSWERS, "--out", again, "--prompts", talks, "--resume"]
    assert train(*resume) == 0
    assert answers_in(again) == found
    assert f"turn {turns + 1}: " in capsys.readouterr().out
    assert train(*resume) == 0
    assert "answers to generate" not in capsys.readouterr().out


def turn_of(key: str) -> int:
    return int(key.rpartition(".")[2]) if is_later(key) else 0


def test_a_run_ends_with_its_minutes(talks: Path, tmp_path: Path) -> None:
    """Turns that are left would otherwise be asked for ever."""
    folder = tmp_path / "out"
    limit = ("--answer-minutes=0.000001", "--prompts", talks, "--out", folder)
    assert train(*SMALL, *ANSWERS, *limit) == 0
    assert len(answers_in(folder)) < 12


def test_shares_divide_talks_as_they_divide_prompts(out: Path, talks: Path, tmp_path: Path) -> None:
    parts: dict[str, Answer] = {}
    for share in ("1/2", "2/2"):
        folder = tmp_path / share[0]
        assert train(*SMALL, *ANSWERS, "--share", share, "--prompts", talks, "--out", folder) == 0
        assert not parts.keys() & answers_in(folder).keys()
        parts |= answers_in(folder)
    assert {k: a.prompt_ids for k, a in parts.items()} == {
        k: a.prompt_ids for k, a in answers_in(out).items()
    }


def test_a_talk_ends_where_no_room_is_left(talks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    short = ("--max-length=130", "--tokens-per-batch=480")
    assert train(*SMALL, *ANSWERS, *short, "--prompts", talks, "--out", folder) == 0
    assert all(len(a.prompt_ids) + 16 <= 130 for a in answers_in(folder).values())


@pytest.mark.parametrize(
    "row",
    [{"turns": ["a", 3]}, {"turns": []}, {"prompt": "a", "later": "b"}, {"later": ["b"]}, 5],
    ids=str,
)
def test_turns_that_are_no_texts_are_refused(row: object, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"bad.jsonl, line 1 has .*`turns`"):
        list(read_chats(file))


def test_the_first_of_two_equal_prompts_counts(tmp_path: Path) -> None:
    file = tmp_path / "twice.jsonl"
    file.write_text('{"turns": ["a", "b"]}\n{"turns": ["a", "c"]}\n')
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    found = read_prompts([file], tokenizer=tokenizer, thinking=None, max_length=100)
    assert found.repeated == 1
    assert [chat.later for chat in found.talks.values()] == [("b",)]


def test_follow_ups_make_talks_of_questions(
    talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that have later turns keep them, and the same question always gets the same ones."""

    def run(*words: str) -> list[dict]:
        out = tmp_path / "out.jsonl"
        monkeypatch.setattr("sys.argv", ["follow_ups", str(talks), *words, "--out", str(out)])
        follow_ups.main()
        return [json.loads(line) for line in out.read_text().splitlines()]

    rows = run("--turns", "3")
    assert rows == run("--turns", "3")
    assert [row["later"] for row in rows[:10]] == [list(LATER)] * 10
    assert all(len(set(row["later"])) == 3 for row in rows[10:])
    assert rows[10]["later"] != rows[11]["later"]
    assert run("--turns", "3", "--seed", "1")[10]["later"] != rows[10]["later"]
    assert re.search(r"^12 talks in .*out.jsonl$", capsys.readouterr().out, re.M)
    with pytest.raises(SystemExit):
        run("--turns", "31")
    assert "--turns 31: pass 1 to 30" in capsys.readouterr().err


def test_follow_ups_refuse_an_out_that_cannot_be_written_before_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this broke, a slip in a path would show after all files were read."""
    missing = tmp_path / "missing"
    refusals = {
        tmp_path: "is a folder",
        missing / "talks.jsonl": f"cannot be written: there is no folder {missing}",
    }
    for out, told in refusals.items():
        words = [str(tmp_path / "no.jsonl"), "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["follow_ups", *words])
        with pytest.raises(SystemExit):
            follow_ups.main()
        assert f"--out {out} {told}" in capsys.readouterr().err
