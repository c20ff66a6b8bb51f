"""The demo's streamed answer distinguishes accepted drafts from the target's own tokens."""

from __future__ import annotations

import re
import time

import pytest
from transformers import PreTrainedTokenizerBase

from launch import demo
from sglang_dflash.testing.server import Server
from sglang_dflash.testing.stream import Answer, Piece, show, stream_pieces

MAX_TOKENS = 80
TRY_S = 120


def test_stream_tells_accepted_drafts_apart(
    plain: Server, dflash: Server, tokenizer: PreTrainedTokenizerBase, questions: list[str]
) -> None:
    for question in questions[:4]:
        messages = [{"role": "user", "content": question}]
        # on a busy machine SGLang may stream two steps as one chunk: ask again
        end = time.monotonic() + TRY_S
        answer = Answer()
        while not answer.is_split_exactly and time.monotonic() < end:
            before = dflash.acceptance()
            answer = Answer()
            pieces = list(
                stream_pieces(dflash.url, tokenizer, messages, max_tokens=MAX_TOKENS, answer=answer)
            )
            after = dflash.acceptance()
        assert answer.is_split_exactly
        counted = {name: after[name] - before[name] for name in ("verify_steps", "accepted_tokens")}
        assert answer.verify_steps == counted["verify_steps"]
        assert sum(piece.accepted for piece in pieces) == counted["accepted_tokens"] > 0
        [expected] = plain.client.chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=MAX_TOKENS
        ).choices
        assert "".join(piece.text for piece in pieces) == answer.text == expected.message.content


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--model-path", "M"], "pass both, or neither"),
        (["--tiny", "--model-path", "M", "--draft-model-path", "D"], "--tiny is a pair of its own"),
    ],
    ids=["half", "two"],
)
def test_not_one_pair_is_refused(
    given: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["demo.py", *given])
    with pytest.raises(SystemExit):
        demo.main()
    assert reason in capsys.readouterr().err


def test_a_pair_that_is_not_there_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["--model-path", "/no/target", "--draft-model-path", "/no/drafter"]
    monkeypatch.setattr("sys.argv", ["demo.py", *given])
    with pytest.raises(SystemExit, match="^demo: The target /no/target cannot be read: there is"):
        demo.main()


def test_marks_stand_around_accepted_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [Piece("I", False), Piece(" a", True), Piece("m", True), Piece(".", False)]
    show(iter(pieces), colour=False)
    show(iter(pieces[:3]), colour=True)
    assert capsys.readouterr().out == "I\u27e6 am\u27e7.\nI\033[32m am\033[0m\n"


def test_the_demo_shows_both_answers_then_speed_and_acceptance(
    plain: Server,
    dflash: Server,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "ANSWERS_S", 0)
    demo.demonstrate(plain, dflash, tokenizer, tuple(questions[:2]))
    out = capsys.readouterr().out
    assert "\n1 of 2 questions answered: no more are asked after 0 s.\n" in out
    own, drafted = (
        out.split(f"{name}:\n")[1].split("\n(")[0] for name in ("plain decoding", "DFLASH")
    )
    assert "⟦" not in own and own == drafted.replace("⟦", "").replace("⟧", "")
    assert "⟦" in drafted
    assert "1 of 1 answers are equal, token for token" in out
    assert re.search(r"\n  DFLASH +█+[▏▎▍▌▋▊▉]? +[\d.]+ tokens/s, [\d.]+x\n", out)
    assert re.search(r"\naccept length [\d.]+: \d+ tokens in \d+ verify steps", out)
