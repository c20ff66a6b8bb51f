"""benchmarks/recipes.py on a CPU: a real recipe with shrunk shapes."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recipes
from sglang_dflash.testing.server import ROOT, free_port

RECIPE = "qwen3-4b"
VOCABULARY = 2048  # twice the tokenizer's
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
ON_CPU = "--device cpu --attention-backend torch_native --dtype float32 --disable-cuda-graph"
ON_CPU += " --speculative-draft-attention-backend torch_native"
ON_CPU += " --disable-overlap-schedule --skip-server-warmup --max-total-tokens 4096"


def shrink(folder: Path) -> None:
    """Write the recipe's shapes with the same architecture and few, narrow layers."""
    for name, own in {
        RECIPE: {"num_hidden_layers": 8},
        f"{RECIPE}-draft": {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
            "num_target_layers": 8,
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 5]},
        },
    }.items():
        config = json.loads((ROOT / "benchmarks" / "shapes" / name / "config.json").read_text())
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | SMALL | own))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks a recipe for a CPU server")
def test_a_recipe_starts_answers_and_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(tmp_path)
    out = tmp_path / "out"
    arguments = ["--recipes", RECIPE, "--systems", "ours", "--shapes", str(tmp_path)]
    arguments += ["--requests", "1", "2", "--context", "32", "--tries", "2", "4"]
    arguments += ["--lengths", "73", "473"]
    arguments += ["--port", str(free_port()), "--out", str(out), *ON_CPU.split()]
    results, missing = recipes.run(recipes.parse(arguments))
    assert missing == []
    cell = results.cells[f"{RECIPE} | bf16 | ours | 8"]
    assert "error" not in cell, cell["error"]
    # random weights may end an answer at once, and their tokens may not be in the tokenizer
    assert cell["openai"]["completion_tokens"] >= 1
    assert cell["memory_gb"]["kv_tokens"] == 4096
    assert {"target_weights", "draft_weights", "target_kv", "draft_kv"} <= set(cell["memory_gb"])
    assert set(cell["attention"].values()) == {"torch_native"}
    assert cell["ours"]["simulated_accept_length"] == 8
    for point in cell["points"]:
        # eight tokens a step, by construction
        steps_per_s = 1000 / point["step_ms"]
        assert point["tokens_per_s"] == pytest.approx(
            8 * point["requests"] * steps_per_s, rel=0.01, abs=0.2
        )
        assert point["spread"] is not None
    text = out.with_suffix(".md").read_text()
    assert f"SGLang {version('sglang')}" in text.splitlines()[0]
    row = text.splitlines()[6]
    assert row.startswith(f"| {RECIPE} | bf16 | ours | ") and "~ / " in row

    monkeypatch.setattr(recipes, "run_group", lambda *_, **__: pytest.fail("measured again"))
    again, _ = recipes.run(recipes.parse(arguments))
    assert again.cells == results.cells
