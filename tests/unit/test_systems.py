"""How a decode rate comes out of two batches, and prompts out of a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import serving
import systems


class Served:
    """A server's log, with what each batch adds to it: read before and after the batch."""

    url = ""

    def __init__(self, together: list[int]) -> None:
        lines = [f"Decode batch, #running-req: {n}, #queue-req: 0\n" for n in together]
        self._logs = iter([log for i in range(len(lines)) for log in (lines[:i], lines[: i + 1])])

    def log(self) -> str:
        return "".join(next(self._logs))


def test_the_log_tells_how_many_ran_together() -> None:
    prefill = "Prefill batch, #new-seq: 2, #new-token: 8, #running-req: 30, #queue-req: 0\n"
    assert systems.ran_together(prefill) == 32
    assert systems.ran_together(prefill + "Decode batch, #running-req: 33, #full token: 1\n") == 33
    full = "KV cache pool is full. Retract requests. #retracted_reqs: 1\n"
    assert systems.ran_together(prefill + full) == 0


def test_a_batch_that_did_not_run_together_is_marked() -> None:
    point = {"requests": 8, "tokens_per_s": 100.0, "step_ms": 20.0}
    assert serving.rate_cell({**point, "together": 8}) == "100.0 (20.00)"
    assert serving.rate_cell({**point, "together": 7}) == "100.0 (20.00), only 7 at once"
    assert serving.rate_cell({**point, "together": 0}) == "100.0 (20.00), with retractions"


def test_a_rate_is_the_difference_between_two_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, start and a slow first batch drop out; the better try of each length counts."""
    slow = iter([9.0, 0.5, 0.0, 0.0, 0.7])

    def run_batch(_url: str, prompts: list, new_tokens: int, _sampling: str) -> tuple[float, list]:
        assert len(prompts) == 4 and all(len(ids) == 10 for ids in prompts)
        return 1.0 + new_tokens * 0.01 + next(slow), []

    monkeypatch.setattr(systems, "run_batch", run_batch)
    # the slower tries had one request waiting; so had, of the better ones, the last
    found = systems.decode_rate(Served([2, 4, 3, 2]), 4, 10, lengths=(8, 108), repeats=2)
    assert found.tokens_per_s == pytest.approx(400)
    assert found.together == 3


def test_noise_is_not_called_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "run_batch", lambda *_: (1.0, []))
    with pytest.raises(RuntimeError, match="take lengths that are further apart"):
        systems.decode_rate(Served([1] * 4), 1, 10, lengths=(8, 108), repeats=2)


def test_prompts_stay_inside_the_vocabulary(tmp_path: Path) -> None:
    assert systems.prompt_ids("some/name") == systems.PROMPT_IDS
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 500}}))
    assert systems.prompt_ids(tmp_path) == (250, 500)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 262_144}))
    assert systems.prompt_ids(tmp_path) == systems.PROMPT_IDS


def test_each_system_has_the_switches_that_make_it():
    assert systems.switches("plain", 8) == {}
    assert systems.switches("in-tree", 8)["SGLANG_DFLASH"] == "off"
    for name in ("ours", *systems.SCHEDULED):
        assert systems.switches(name)["SGLANG_DFLASH"] == "on"
    assert systems.switches("ours-in-turn")["SGLANG_ENABLE_DFLASH_SPEC_V2"] == "0"
    assert systems.switches("ours-plan-stream")["SGLANG_ENABLE_OVERLAP_PLAN_STREAM"] == "1"


def test_the_table_shows_idle_time_of_what_was_traced():
    point = {"context": 512, "requests": 8, "tokens_per_s": 100.0, "step_ms": 20.0}
    split = {"context": 512, "requests": 8, "idle_share": 0.0125}
    results = {
        "ours": {"points": [point], "gpu_time": [split]},
        "in-tree": {"points": [{**point, "tokens_per_s": 50.0}]},
    }
    shown = serving.table(results)
    assert "| greedy | 512 | 8 | 100.0 (20.00) | 50.0 (20.00) | 2.00x |" in shown
    assert shown.endswith(
        "| GPU idle: context | requests | ours |\n|---|---|---|\n| 512 | 8 | 1.2% |"
    )
    alone = serving.table({"ours": {"points": [point]}})
    assert alone.endswith("|---|---|---|---|\n| greedy | 512 | 8 | 100.0 (20.00) |")
