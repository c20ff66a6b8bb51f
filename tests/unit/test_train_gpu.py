"""Training on a GPU: bf16 blocks with both kinds of attention, and the command end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import repeat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.pairs.tiny_corpus.corpus import make_conversations, sample_prompts
from sglang_dflash.reference.model import Drafter
from sglang_dflash.testing.server import ROOT
from sglang_dflash.train.batches import collate, encode_chat
from sglang_dflash.train.loss import DrafterLoss
from sglang_dflash.train.trainer import Schedule, optimise

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def batch():
    tokenizer = AutoTokenizer.from_pretrained(tiny_target())
    chats = make_conversations(8, seed=5)
    return collate([encode_chat(tokenizer, c.messages()) for c in chats], pad_id=0, multiple=64)


def drafter_loss(device: str, attention: str, drafter: Drafter) -> DrafterLoss:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=dtype)
    return DrafterLoss(
        target=target.to(device).eval().requires_grad_(False),
        drafter=drafter.to(device),
        generator=torch.Generator().manual_seed(0),
        blocks=64,
        chunk=200,
        attention=attention,
    )


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_loss_on_a_gpu_is_that_on_a_cpu(batch, attention: str):
    """If this broke, the figures of a GPU run would not match those of the tests."""
    expected = drafter_loss("cpu", "sdpa", Drafter.from_pretrained(tiny_drafter()))(batch).item()
    found = drafter_loss("cuda", attention, Drafter.from_pretrained(tiny_drafter()))(batch).item()
    # bf16 rounds each activation to 3 significant digits
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_a_few_steps_on_a_gpu_lower_the_loss(batch, attention: str):
    """If this broke, gradients would not reach the weights through this attention."""
    torch.manual_seed(0)
    drafter = Drafter(Drafter.from_pretrained(tiny_drafter()).config)
    loss_of = drafter_loss("cuda", attention, drafter)
    schedule = Schedule(steps=40, learning_rate=3e-3)
    losses = optimise(drafter, repeat(batch), loss_of=loss_of, schedule=schedule, label=attention)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_the_command_runs_on_a_gpu(tmp_path: Path, engine: str):
    """If this broke, training would not work where it is fast."""
    rows = [json.dumps({"prompt": text}) for text in sample_prompts(24, seed=1, split="train")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    arguments = [
        *("train", "--device", "cuda", "--model-path", str(tiny_target()), "--engine", engine),
        *("--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")),
        *("--layers", "2", "--max-length", "192", "--max-new-tokens", "32", "--held-out", "4"),
        *("--tokens-per-batch", "2048", "--anchors", "16", "--minutes", "0.2"),
        *("--evaluate-prompts", "2", "--evaluate-tokens", "16", "--engine-rows", "8"),
    ]
    # in a separate process: an engine that shuts down kills every child of its process
    subprocess.run([sys.executable, "-m", "sglang_dflash", *arguments], cwd=ROOT, check=True)
    assert Drafter.from_pretrained(tmp_path / "out" / "drafter").config.num_hidden_layers == 2
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert [loop["temperature"] for loop in scores["loops"]] == [0.0, 1.0, 1.0]
