"""SGLang's offline engine gives the target's own tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sglang_dflash.pairs import tiny_target
from sglang_dflash.pairs.tiny_corpus.corpus import sample_prompts
from sglang_dflash.reference.generate import generate_plain
from sglang_dflash.testing.server import ROOT
from sglang_dflash.train.answers import answer_files, read_answers


def test_engine_answers_are_those_of_plain_decoding(tmp_path: Path) -> None:
    """If this broke, drafters would be trained on text that a server does not produce.

    Runs in a separate process: an engine that shuts down kills every child of its process.
    """
    rows = [json.dumps({"prompt": text}) for text in sample_prompts(8, seed=2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    command = [
        *(sys.executable, "-m", "sglang_dflash", "train", "--model-path", str(tiny_target())),
        *("--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")),
        *("--engine", "sglang", "--attention-backend", "torch_native", "--engine-rows", "4"),
        *("--held-out", "5", "--max-new-tokens", "24", "--stop-after", "answers"),
    ]
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'sglang_dflash/glue/cpu/path'}",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = list(read_answers(answer_files(tmp_path / "out")).values())
    assert len(answers) == 8
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32).eval()
    for answer in answers[:5]:
        prompt = answer.prompt_ids.tolist()
        plain = generate_plain(target, prompt, max_new_tokens=24, eos_token_ids={2})
        assert answer.answer_ids.tolist() == plain
