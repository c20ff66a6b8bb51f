"""`tune` as a user runs it, on the embedded pair."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from sglang_dflash.commands import tune
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.pairs.tiny_corpus.corpus import sample_prompts
from tests import programs


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU, more would be measured")
def test_a_pair_is_measured_and_the_best_settings_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # two rounds: beside other tests no two agree
    monkeypatch.setattr(tune, "MOST_S", 0.0)
    prompts = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"prompt": text}) for text in sample_prompts(4, seed=5)]
    prompts.write_text("\n".join(rows) + "\n")
    arguments = ["--model-path", tiny_target(), "--speculative-draft-model-path", tiny_drafter()]
    arguments += ["--prompts", prompts, "--requests", "1", "2", "--max-tokens", "16"]
    arguments += ["--blocks", "16", "4", "--widths", "auto", "--out", tmp_path / "out.json"]
    arguments += ["--context-length", "512"]
    ran = programs.run("sglang_dflash", "tune", *arguments, folder=tmp_path)
    assert ran.status == 0, ran.output
    found = json.loads((tmp_path / "out.json").read_text())
    names = [trial["settings"] for trial in found["trials"]]
    assert names == ["plain decoding", "block size 16", "block size 4"]
    for trial in found["trials"]:
        assert trial["error"] is None and all(trial["tokens_per_s"][n] > 0 for n in ("1", "2"))
    plain, *ours = (trial["accept_length"] for trial in found["trials"])
    assert plain is None and all(1 <= length <= 16 for length in ours)
    launch = shlex.split(ran.output.splitlines()[-1])
    assert launch[0] == "launch/cpu.sh" and launch[-2:] == ["--context-length", "512"]
    assert launch[launch.index("--speculative-num-draft-tokens") + 1] in ("16", "4")
    assert "over plain decoding: " in ran.output
