"""The real pair that the demo serves: exact, and with useful acceptance."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from launch import demo
from sglang_dflash.pairs import smollm2_drafter
from sglang_dflash.pairs.smollm2 import smollm2_target
from sglang_dflash.reference.model import Drafter
from sglang_dflash.testing.server import Server

MAX_BYTES = 26 * 10**6
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def target() -> Path:
    try:
        return smollm2_target()
    except RuntimeError as error:
        pytest.skip(f"the target cannot be had: {error}")


def test_the_drafter_is_small_and_fits_its_target(target: Path) -> None:
    """If this broke, the demo would not start."""
    folder = smollm2_drafter()
    assert sum(path.stat().st_size for path in folder.iterdir()) < MAX_BYTES
    config, drafted = AutoConfig.from_pretrained(target), Drafter.from_pretrained(folder).config
    assert drafted.block_size == 16
    assert (drafted.hidden_size, drafted.vocab_size) == (config.hidden_size, config.vocab_size)
    assert drafted.num_target_layers == config.num_hidden_layers > max(drafted.target_layer_ids)


def test_the_card_says_how_it_was_made() -> None:
    """If this broke, this drafter could not be reproduced."""
    card = (smollm2_drafter() / "README.md").read_text()
    for text in ("python -m sglang_dflash train", "gsm8k_train.jsonl", "Apache-2.0", "H200"):
        assert text in card, text
    assert not re.search(r"[ =]/\w", card), "a path of the machine that made it"


def test_the_demonstration_chats_and_measures(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this broke, the first thing a newcomer runs would be misleading."""
    monkeypatch.setattr("sys.argv", ["demo.py"])
    # on a busy machine the automatic width may rightly choose not to draft
    monkeypatch.setenv("SGLANG_DFLASH_WIDTH", "6")
    # tests run beside this one: two teams of threads on the same cores would stall each other
    monkeypatch.setattr(demo.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(demo, "MAX_TOKENS", MAX_TOKENS)
    monkeypatch.setattr(demo, "QUESTIONS", demo.QUESTIONS[:2])
    asked: list[Server] = []
    demonstrate = demo.demonstrate

    def keep(plain: Server, dflash: Server, tokenizer: Any, questions: tuple[str, ...]) -> None:
        asked.extend([plain, dflash])
        texts = [
            server.client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": questions[0]}],
                temperature=0,
                max_tokens=MAX_TOKENS,
            )
            .choices[0]
            .message.content
            for server in asked
        ]
        assert texts[0] == texts[1] != ""
        demonstrate(plain, dflash, tokenizer, questions)

    monkeypatch.setattr(demo, "demonstrate", keep)
    demo.main()
    text = capsys.readouterr().out
    assert asked and "⟦" in text
    found = re.search(r"accept length ([\d.]+): (\d+) tokens in (\d+) verify steps", text)
    assert found is not None and float(found[1]) > 1.5, text[-2000:]
    assert "on this machine, in this run" in text
