"""The plan, the budget and the table of benchmarks/recipes.py, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipes, systems
from benchmarks.recipe_report import report


def measured(step_ms: float, call: int = 0, **cell: Any) -> dict[str, Any]:
    memory = {"target_weights": 15.3, "target_kv": 90.0, "graphs": 1.25, "kv_tokens": 600000}
    return {
        "recipe": "qwen3-8b",
        "variant": "bf16",
        "call": call,
        "start_s": 71.4,
        "openai": {"completion_tokens": 16},
        "memory_gb": memory,
        "points": [{"requests": 2, "tokens_per_s": 0.0, "step_ms": step_ms}],
        **cell,
    }


def test_every_recipe_has_shapes() -> None:
    assert recipes.known_recipes(recipes.SHAPES) == [
        "gemma4-26b-a4b",
        "gemma4-31b",
        "gpt-oss-20b",
        "llama-3.1-8b",
        "qwen3-4b",
        "qwen3-8b",
        "qwen3-coder-30b-a3b",
    ]
    for name in recipes.known_recipes(recipes.SHAPES):
        drafter = json.loads((recipes.SHAPES / f"{name}-draft" / "config.json").read_text())
        target = json.loads((recipes.SHAPES / name / "config.json").read_text())
        assert drafter["hidden_size"] == target["hidden_size"]
        assert drafter["num_target_layers"] == target["num_hidden_layers"]


def test_the_plan_starts_plain_once_and_dflash_at_every_length() -> None:
    options = recipes.parse(["--recipes", "qwen3-8b", "--verify-lengths", "4"])
    assert [tuple(cell)[2:] for cell in recipes.plan(options)] == [
        ("plain", 0),
        ("in-tree", 8),
        ("in-tree", 4),
        ("ours", 8),
        ("ours", 4),
    ]


def test_an_unknown_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipes.parse(["--recipes", "qwen9"])
    assert "qwen9" in capsys.readouterr().err


def test_failures_are_kept_and_a_spent_budget_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later call resumes where the budget ran out."""
    started = serve_nothing(monkeypatch)
    arguments = ["--recipes", "qwen3-4b", "--out", str(tmp_path / "r")]
    _, missing = recipes.run(recipes.parse([*arguments, "--budget-s", "1"]))
    assert len(missing) == 3 and started == []
    options = recipes.parse(arguments)
    results, missing = recipes.run(options)
    assert missing == [] and started == ["plain", "in-tree", "ours"]
    assert "in-tree at accept length 8: did not run: ValueError: no such backend" in results.text()
    recipes.run(options)
    assert len(started) == 3
    recipes.run(recipes.parse([*arguments, "--retry"]))
    assert started[3:] == ["in-tree"]
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["earlier_calls"]) == 1 and len(found["cells"]) == 3


class Nothing:
    """A fake server; in-tree DFLASH does not start."""

    start_s = 1.0

    def __init__(self, system: str) -> None:
        self._system = system

    def wait(self, *, timeout_s: float) -> None:
        if self._system == "in-tree":
            raise RuntimeError("server ended:\nValueError: no such backend\nbye")

    def stop(self) -> None:
        pass


def serve_nothing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake all servers; return the list of started systems, "+" before those beside another."""
    started: list[str] = []

    def serve(cell: recipes.Cell, _: Any, *, beside: int) -> Nothing:
        started.append(f"{'+' * bool(beside)}{cell.system}")
        return Nothing(cell.system)

    def measure(*_: Any) -> dict[str, Any]:
        return {k: v for k, v in measured(10.0).items() if k not in ("recipe", "variant", "call")}

    monkeypatch.setattr(recipes, "serve", serve)
    monkeypatch.setattr(recipes, "measure", measure)
    return started


@pytest.mark.parametrize(
    ("at_once", "started"),
    [
        ("3", ["+plain", "+in-tree", "+ours"] * 2),
        ("2", ["+plain", "+in-tree", "ours"] * 2),
    ],
)
def test_servers_of_one_recipe_start_side_by_side(
    monkeypatch: pytest.MonkeyPatch, at_once: str, started: list[str]
) -> None:
    seen = serve_nothing(monkeypatch)
    arguments = ["--recipes", "qwen3-4b", "qwen3-8b", "--side-by-side", "--at-once", at_once]
    results, missing = recipes.run(recipes.parse(arguments))
    assert seen == started and missing == []
    beside = results.cells["qwen3-8b | bf16 | plain | 0"]["beside"]
    assert beside == int(at_once) - 1
    assert "| plain |  | (71) | yes |" in results.text()


def test_the_pool_holds_the_largest_point() -> None:
    options = recipes.parse(["--requests", "1", "32", "--context", "512", "--lengths", "73", "553"])
    assert recipes.tokens_needed(options) >= 32 * (512 + 553)


def test_the_table_names_backends_and_marks_rates_that_did_not_settle() -> None:
    cell = measured(10.0, system="plain", length=0)
    cell["attention"] = {"prefill": "fa3", "decode": "fa3"}
    cell["points"][0] |= {"spread": 0.09, "together": 1}
    text = report([cell], shown_lengths=[8])
    assert "| plain | fa3 | 71 | yes |" in text and "| 200?! |" in text


def test_the_table_marks_what_is_derived_and_what_is_not_one_call() -> None:
    cells = [
        measured(10.0, system="plain", length=0),
        measured(24.0, system="in-tree", length=8),
        measured(20.0, system="ours", length=8, call=1),
        measured(19.0, system="ours", length=4, call=1),
    ]
    text = report(cells, shown_lengths=[4, 6, 8])
    rows = {line.split(" | ")[2]: line.split(" | ")[-2:] for line in text.splitlines()[4:7]}
    assert rows["plain"] == ["200", " |"]
    # 2 requests with 4, 6 and 8 tokens per 24 ms
    assert rows["in-tree"] == ["333~ / 500~ / 667", " |"]
    assert rows["ours"] == ["421 / 600~ / 800", "1.20x* |"]
    assert "accept length 4, 2 requests: measured 421, derived 400 tok/s (-5.0%)" in text


@pytest.mark.parametrize("draft_weights", [1.96, -0.04])
def test_memory_is_read_part_by_part(draft_weights: float) -> None:
    log = "\n".join(
        [
            "Load weight end. type=Qwen3ForCausalLM, avail mem=120.00 GB, mem usage=15.27 GB.",
            "Load weight end. type=DFlashDraftModel, avail mem=118.00 GB, "
            f"mem usage={draft_weights:.2f} GB.",
            "Memory pool end. avail mem=30.50 GB",
            "Memory pool end. avail mem=20.25 GB",
        ]
    )
    usage = {
        "weight": 15.27,
        "kvcache": 87.5,
        "startup_available": 17.0,
        "token_capacity": 600000,
        "token_capacity_swa": None,
        "graph": {"decode": 1.0, "prefill": 0.5},
    }
    found = systems.memory_by_part({"memory_usage": usage}, log)
    assert found["draft_weights"] == draft_weights
    assert (found["draft_kv"], found["graphs"]) == (10.25, 1.5)
    assert (found["target_weights"], found["target_kv"]) == (15.27, 87.5)
