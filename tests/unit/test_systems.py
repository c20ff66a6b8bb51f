"""How systems are started, and how a decode rate is derived from two batches."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT, batch_load, result_files, serving, sharing, systems


class Served:
    """A server's log, to which each batch adds a line: read before and after the batch."""

    url = ""

    def __init__(self, together: list[int]) -> None:
        lines = [f"Decode batch, #running-req: {n}, #queue-req: 0\n" for n in together]
        self._logs = iter([log for i in range(len(lines)) for log in (lines[:i], lines[: i + 1])])

    def log(self) -> str:
        return "".join(next(self._logs))


def test_the_log_tells_how_many_ran_together() -> None:
    prefill = "Prefill batch, #new-seq: 2, #new-token: 8, #running-req: 30, #queue-req: 0\n"
    assert batch_load.ran_together(prefill) == 32
    decode = "Decode batch, #running-req: 33, #full token: 1\n"
    assert batch_load.ran_together(prefill + decode) == 33
    full = "KV cache pool is full. Retract requests. #retracted_reqs: 1\n"
    assert batch_load.ran_together(prefill + full) == 0


def test_a_batch_that_did_not_run_together_is_marked() -> None:
    point = {"requests": 8, "tokens_per_s": 100.0, "step_ms": 20.0}
    assert serving.rate_cell({**point, "together": 8}) == "100.0 (20.00)"
    assert serving.rate_cell({**point, "together": 7}) == "100.0 (20.00), only 7 at once"
    assert serving.rate_cell({**point, "together": 0}) == "100.0 (20.00), with retractions"


def test_a_rate_is_the_difference_between_two_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, start-up and a slow first batch drop out; the faster try of each length counts."""
    slow = iter([9.0, 0.5, 0.0, 0.0, 0.7])  # first batch, then short, long, short, long

    def run_batch(_url: str, prompts: list, new_tokens: int, _sampling: str) -> tuple[float, list]:
        assert len(prompts) == 4 and all(len(ids) == 10 for ids in prompts)
        return 1.0 + new_tokens * 0.01 + next(slow), []

    monkeypatch.setattr(batch_load, "run_batch", run_batch)
    # the slower tries had two requests waiting, the faster of the longer batches had one
    found = batch_load.decode_rate(Served([2, 3, 4, 2]), 4, 10, lengths=(8, 108), tries=(2, 2))
    assert found.tokens_per_s == pytest.approx(400)
    assert found.together == 3
    # 1.0 s between the fastest batches, 1.2 s between the others
    assert found.numbers()["spread"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("longer", "tries", "spread"),
    [
        ([3.0, 3.0], 2, 0.0),
        ([3.0, 4.0, 3.04], 3, 0.02),
        ([3.0, 4.0, 4.0], 3, 0.5),
        ([1.5, 1.5, 1.5], 3, 0.0),
    ],
    ids=["agree", "the third agrees", "never agree", "too short for two"],
)
def test_tries_go_on_until_two_agree(
    monkeypatch: pytest.MonkeyPatch, longer: list[float], tries: int, spread: float
) -> None:
    monkeypatch.setattr(batch_load, "SECONDS_PER_RATE", 4.0)
    seconds = iter([0.0, *(taken for long in longer for taken in (1.0, long)), 0.0])
    monkeypatch.setattr(batch_load, "run_batch", lambda _, ids, *__: (next(seconds), ids))
    found = batch_load.decode_rate(Served([1] * 6), 1, 10, lengths=(8, 108), tries=(2, 3))
    assert found.spread == pytest.approx(spread)
    assert len(list(seconds)) == 1 + 2 * (len(longer) - tries)
    # systems are compared by their answers, so these must not depend on the number of tries
    assert found.answers == batch_load.draw_prompts(1, 10, "0 108")


def test_one_try_has_no_spread_and_is_not_marked() -> None:
    assert batch_load.spread_of([1.0], [2.0]) is None
    for steady in ({"spread": None}, {}, {"spread": 0.05}):
        assert not result_files.is_unsteady(steady)
    assert result_files.is_unsteady({"spread": 0.051})


def test_the_help_can_be_read() -> None:
    parser = argparse.ArgumentParser()
    batch_load.add_load_options(parser, lengths=(64, 320))
    assert "agree within 5%" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("wrong", [["--lengths", "313", "73"], ["--tries", "3", "2"]])
def test_numbers_that_do_not_rise_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    batch_load.add_load_options(parser, lengths=(64, 320))
    with pytest.raises(SystemExit):
        batch_load.check_load_options(parser, parser.parse_args(wrong))
    assert " ".join(wrong) in capsys.readouterr().err


def test_noise_is_not_called_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_load, "run_batch", lambda *_: (1.0, []))
    with pytest.raises(RuntimeError, match="use lengths that are further apart"):
        batch_load.decode_rate(Served([1] * 4), 1, 10, lengths=(8, 108), tries=(2, 2))


def test_prompts_stay_inside_the_vocabulary(tmp_path: Path) -> None:
    assert batch_load.prompt_ids("some/name") == batch_load.PROMPT_IDS
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 500}}))
    assert batch_load.prompt_ids(tmp_path) == (250, 500)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 262_144}))
    assert batch_load.prompt_ids(tmp_path) == batch_load.PROMPT_IDS


def test_each_system_has_the_switches_that_make_it():
    for name in ("plain", "plain-triton"):
        assert systems.switches(name, 8) == {"PLAIN": "1"}
    for name in ("in-tree", "in-tree-fa4"):
        assert systems.switches(name, 8) == {
            "PLAIN": "0",
            "SGLANG_DFLASH": "off",
            "SGLANG_SIMULATE_ACC_LEN": "8",
        }
    for name in ("ours", *systems.SCHEDULED):
        assert systems.switches(name)["SGLANG_DFLASH"] == "on"
    widths = [
        systems.switches(name)["SGLANG_DFLASH_WIDTH"] for name in ("ours", "ours-16", "ours-fa3")
    ]
    assert widths == ["auto", "16", "auto"]
    assert systems.switches("ours-in-turn")["SGLANG_ENABLE_DFLASH_SPEC_V2"] == "0"
    assert systems.switches("ours-plan-stream")["SGLANG_ENABLE_OVERLAP_PLAN_STREAM"] == "1"


def test_the_table_shows_the_gpu_time_of_what_was_traced():
    point = {"context": 512, "requests": 8, "tokens_per_s": 100.0, "step_ms": 20.0}
    split = {"context": 512, "requests": 8, "parts_ms": {"draft": 1.625, "idle": 0.25}}
    theirs = split | {"parts_ms": {"outside graphs": 2.0, "idle": 0.5}}
    results = {
        "ours": {"points": [point], "gpu_time": [split]},
        "in-tree": {"points": [{**point, "tokens_per_s": 50.0}], "gpu_time": [theirs]},
    }
    shown = serving.table(results)
    assert "| greedy | 512 | 8 | 100.0 (20.00) | 50.0 (20.00) | 2.00x |" in shown
    assert shown.splitlines()[-4:] == [
        "| GPU time of a step, ms: context | requests | system | draft | idle | outside graphs |",
        "|---|---|---|---|---|---|",
        "| 512 | 8 | ours | 1.62 | 0.25 |  |",
        "| 512 | 8 | in-tree |  | 0.50 | 2.00 |",
    ]
    alone = serving.table({"ours": {"points": [point]}})
    assert alone.endswith("|---|---|---|---|\n| greedy | 512 | 8 | 100.0 (20.00) |")


LLAMA = ROOT / "benchmarks" / "shapes" / "llama-3.1-8b"
GEMMA = ROOT / "benchmarks" / "shapes" / "gemma4-31b"
TARGET, DRAFT = "--attention-backend", "--speculative-draft-attention-backend"


@pytest.mark.parametrize(
    ("system", "target", "forced", "arguments"),
    [
        ("plain", LLAMA, None, []),
        ("plain", GEMMA, None, []),
        ("in-tree", LLAMA, None, []),
        ("in-tree", "Qwen/Qwen3-8B", None, []),
        ("in-tree", GEMMA, None, [DRAFT, "fa4"]),
        ("in-tree", "google/gemma-4-31B-it", None, [DRAFT, "fa4"]),
        ("in-tree", LLAMA, "triton", [TARGET, "triton"]),
        ("in-tree-fa4", LLAMA, "triton", [TARGET, "fa4"]),
        ("in-tree-triton", GEMMA, None, [TARGET, "triton", DRAFT, "fa4"]),
        ("plain-fa4", GEMMA, None, [TARGET, "fa4"]),
        ("ours", LLAMA, "fa3", [TARGET, "triton", DRAFT, "fa4"]),
        ("ours-in-turn", GEMMA, None, [TARGET, "triton", DRAFT, "fa4"]),
        ("ours-16", LLAMA, None, [TARGET, "triton", DRAFT, "fa4"]),
        ("ours-fa3", LLAMA, None, [TARGET, "fa3", DRAFT, "fa4"]),
    ],
)
def test_sglang_picks_the_peers_backends(
    system: str, target: Path | str, forced: str | None, arguments: list[str]
) -> None:
    """A peer forced onto Triton would be slower than what a user gets on Hopper."""
    assert systems.system_name(system) == system
    assert systems.backend_args(system, target, forced) == arguments


@pytest.mark.parametrize("name", ["our", "in-tree-", "ours-fa5", "ours-17", "in-tree-16", "dflash"])
def test_an_unknown_system_is_refused(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=name):
        systems.system_name(name)


def test_the_table_names_the_backends_that_served() -> None:
    info = {"attention_backend": "fa3", "prefill_attention_backend": None}
    plain = systems.backends_in_use(info)
    in_tree = systems.backends_in_use({**info, "speculative_algorithm": "DFLASH"})
    ours = systems.backends_in_use(
        {
            "attention_backend": "triton",
            "decode_attention_backend": "flashinfer",
            "speculative_algorithm": "DFLASH",
            "speculative_draft_attention_backend": "fa4",
        }
    )
    results = {"plain": plain, "in-tree": in_tree, "ours": ours}
    line = systems.backends_line({name: {"attention": used} for name, used in results.items()})
    assert line == (
        "Attention backends: plain fa3; in-tree fa3, draft fa3; "
        "ours triton / flashinfer, draft fa4."
    )
    assert systems.backends_line({"plain": {"points": []}}) == ""
    assert line in serving.table({name: {"attention": used} for name, used in results.items()})


def test_a_result_names_the_release(tmp_path: Path) -> None:
    found = {"command": "python x.py", "gpu": None, "commit": "abc", "sglang": "0.5.17"}
    result_files.write(found, tmp_path / "r", "the table")
    text = (tmp_path / "r.md").read_text()
    assert text == "`python x.py`, no GPU, SGLang 0.5.17, commit abc\n\nthe table\n"


def test_a_dot_in_the_name_of_a_result_file_cuts_nothing_off(tmp_path: Path) -> None:
    """SGLang 0.5.23's figures were once written to serving-0.5.json."""
    assert result_files.result_file(tmp_path / "a-0.5.23-h200", ".md").name == "a-0.5.23-h200.md"
    assert result_files.result_file(tmp_path / "a.json", ".json").name == "a.json"


def test_the_recorded_command_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks" / "kernels.py"), "--out", out])
    program = sys.modules["__main__"]
    monkeypatch.setattr(program, "__spec__", importlib.util.find_spec("benchmarks.kernels"))
    assert result_files.recorded_command() == "python -m benchmarks.kernels"
    monkeypatch.setattr(program, "__spec__", None)
    assert result_files.recorded_command() == "python benchmarks/kernels.py"


def test_no_folder_is_recorded_in_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "--prompts my/a.jsonl my/b.jsonl --data my/tasks --requests 1 8 --logs=my/logs"
    monkeypatch.setattr("sys.argv", ["program", *asked.split()])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    found = result_files.recorded_command(["--data", "--logs"], ["--prompts"])
    assert found == "python program --prompts a.jsonl b.jsonl --requests 1 8"


def test_serving_needs_nothing_of_this_package_but_the_harness() -> None:
    """Another SGLang release is measured in an environment that cannot import the rest."""
    program = (
        "import sys; sys.modules['sglang'] = None; import benchmarks.serving;"
        "print(*sorted(name for name in sys.modules if name.startswith('sglang_dflash.')))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    needed = ["command_help", "interrupt", "testing", "testing.progress", "testing.server"]
    assert ran.stdout.split() == [f"sglang_dflash.{name}" for name in needed]


def test_tries_that_differ_are_told_apart_in_the_table() -> None:
    point = {"requests": 8, "tokens_per_s": 100.0, "step_ms": 20.0}
    assert serving.rate_cell({**point, "spread": 0.08}) == "100.0 (20.00), tries 8% apart"
    assert serving.rate_cell({**point, "spread": 0.03}) == "100.0 (20.00)"


class Started:
    """A fake server that starts or fails."""

    def __init__(self, name: str, events: list[str], *, fails: bool = False) -> None:
        self._name, self._events, self._fails = name, events, fails
        events.append(f"start {name}")

    def wait(self, *, timeout_s: float) -> None:
        self._events.append(f"wait {self._name}")
        if self._fails:
            raise RuntimeError(f"{self._name} ended")


def test_servers_start_together_and_have_their_turns() -> None:
    """No server is measured while another still loads, and a failure does not affect the others."""
    events: list[str] = []
    starts: dict[str, Any] = {
        name: lambda name=name: Started(name, events, fails=name == "b") for name in "abc"
    }
    for name, _, failed in sharing.serve_all(starts, lambda key, _: events.append(f"stop {key}")):
        events.append(f"{name} failed" if failed else f"measure {name}")
    assert events == [
        *("start a", "start b", "start c", "wait a", "wait b", "wait c"),
        *("measure a", "stop a", "b failed", "stop b", "measure c", "stop c"),
    ]
    events.clear()
    for _ in sharing.serve_all(starts, lambda key, _: events.append(f"stop {key}")):
        break
    assert events[-3:] == ["stop a", "stop b", "stop c"]
