"""Which result a call of the smoke test makes, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.glue import release
from sglang_dflash.testing.server import ROOT
from tests.smoke import join, run, servers
from tests.smoke.families import FAMILIES, Family

FINE = {"checks": {"exact": {"greedy": "ok"}}}
SEAMS = ROOT / "sglang_dflash" / "glue" / "seams"


@pytest.mark.parametrize(
    "words",
    ["--families gemma4", "--no-recipe", "--tp 2 --families gemma4"],
)
def test_a_part_does_not_replace_the_result_of_the_whole(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make test` would otherwise compare the tree with a test of one family."""
    with pytest.raises(SystemExit):
        run.parse(words.split())
    assert "name a file by --out" in capsys.readouterr().err
    assert not run.parse([*words.split(), "--out", "part.json"]).is_whole


@pytest.mark.parametrize("words", [[], ["--tp", "2"], ["--tp", "2", "--no-recipe"]])
def test_all_families_are_the_whole(words: list[str]) -> None:
    assert run.parse(words).is_whole


def test_no_family_is_no_pass() -> None:
    with pytest.raises(SystemExit):
        run.parse(["--families", "--out", "none.json"])


def test_a_result_is_named_after_its_gpu_release_and_ranks() -> None:
    report = {"gpu": "NVIDIA H200", "sglang": release.NEWEST, "ranks": 1}
    assert run.result_file(report) == run.RESULTS / "smoke-h200.json"
    other = report | {"gpu": "NVIDIA B200", "sglang": "0.5.17", "ranks": 2}
    assert run.result_file(other).name == "smoke-0.5.17-tp2-b200.json"


def test_families_with_states_are_left_out_where_they_are_refused() -> None:
    for version in release.SERVED:
        source = (SEAMS / f"sglang_{version.replace('.', '_')}.py").read_text()
        refused = "chooses_snapshots = False" in source
        left_out = {each.name for each in FAMILIES} - set(run.names_of(1, version))
        assert left_out == (
            {each.name for each in FAMILIES if each.has_states} if refused else set()
        )


def test_the_recipe_starts_as_a_user_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill graphs take memory and time at start-up: without them the recipe is not the one."""
    given: list[Any] = []

    def run_group(cells: Any, options: Any, **_: Any) -> list[Any]:
        given.append(options.server_args)
        return [(cells[0], {})]

    monkeypatch.setattr(run.recipes, "run_group", run_group)
    run.run_recipe(lambda: None)
    assert given == [["--cuda-graph-max-bs-decode", "8", "--max-total-tokens", "65536"]]


def test_a_deployed_server_gets_nothing_that_is_for_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started as by a user: arguments for the exact servers once reached it as well."""
    for name in ("Exact", "Deployed"):
        monkeypatch.setattr(servers, name, lambda *args, **_: list(args))
    for family in FAMILIES:
        found: dict[str, Any] = dict(servers.start(family, tmp_path / family.name, small=False))
        asked = {word for word in found["deployed"] if word.startswith("--")}
        assert not asked & {"--linear-attn-prefill-backend", "--moe-runner-backend"}, family.name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_drafter_is_made_for_contexts_as_long_as_its_targets(
    tmp_path: Path, family: Family
) -> None:
    """SGLang refuses others, once the target has been loaded."""
    written = (family.write_target, family.write_drafter)
    files = [write(tmp_path / write.__name__, fp32=False) / "config.json" for write in written]
    target, drafter = (json.loads(file.read_text())["max_position_embeddings"] for file in files)
    assert drafter >= target


def call(file: Path, **parts: Any) -> Path:
    about = {"commit": "abc", "gpu": "NVIDIA H200", "sglang": "0.5.23", "ranks": 1}
    file.write_text(json.dumps({**about, "command": "smoke", "seconds": 5.0, **parts}))
    return file


def joined(monkeypatch: pytest.MonkeyPatch, *words: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["join", *map(str, words)])
    join.main()


def test_two_ranks_have_families_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the names of one rank, a result of two was never whole, and was written over it."""
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    families = dict.fromkeys(run.ON_TWO_RANKS, FINE)
    joined(monkeypatch, call(tmp_path / "a.json", ranks=2, families=families))
    found = json.loads((tmp_path / "smoke-tp2-h200.json").read_text())
    assert found["whole"] and found["passed"]


def test_calls_that_are_not_the_whole_need_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    families = {name: FINE for name in run.names_of(1, "0.5.23") if name != "llama"}
    part = call(tmp_path / "a.json", families=families, recipe={"31B": FINE})
    with pytest.raises(SystemExit):
        joined(monkeypatch, part)
    assert "without llama it is not a whole smoke test" in capsys.readouterr().err
    joined(monkeypatch, part, "--out", tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text())["whole"] is False
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json"}


def test_what_is_no_result_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^results none\.json: No such file"):
        joined(monkeypatch, "none.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(SystemExit, match="a.json has no 'command'"):
        joined(monkeypatch, tmp_path / "a.json")


def called(monkeypatch: pytest.MonkeyPatch, out: Path, stopped_at: str | None = None) -> None:
    """Call the smoke test on families that do nothing, and on a recipe that fails to start; Ctrl-C
    comes while the named family runs, and others have ended."""

    def run_family(family: Any, **_: Any) -> dict[str, Any]:
        if family.name == stopped_at:
            while not out.with_suffix(".part.json").exists():
                time.sleep(0.01)
            raise KeyboardInterrupt
        return FINE

    def no_group(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(run, "run_family", run_family)
    # asked if the last families to begin are compiled ones
    monkeypatch.setattr(run.gpu, "free_gib", lambda: 0.0)
    monkeypatch.setattr(run, "LOOK_S", 0.01)
    monkeypatch.setattr(run.recipes, "run_group", no_group)
    about = {"command": "smoke", "commit": "c0ffee", "gpu": "H200", "sglang": release.NEWEST}
    monkeypatch.setattr(run.result_files, "provenance", lambda _: about)
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["smoke", "--out", str(out), "--at-once", "1"])
    run.main()


def test_a_recipe_that_fails_loses_no_family(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="1"):
        called(monkeypatch, tmp_path / "smoke.json")
    found = json.loads((tmp_path / "smoke.json").read_text())
    assert found["whole"] and not found["passed"]
    assert set(found["families"]) == set(run.names_of(1, release.installed()))
    assert found["recipe"][run.RECIPE.key]["error"] == "RuntimeError: no memory"
    assert [file.name for file in tmp_path.iterdir()] == ["smoke.json"]


def test_a_run_that_is_cut_off_keeps_the_families_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "STOPPED", threading.Event())
    with pytest.raises(KeyboardInterrupt):
        called(monkeypatch, tmp_path / "smoke.json", stopped_at="llama")
    found = json.loads((tmp_path / "smoke.part.json").read_text())
    assert found["families"] and "llama" not in found["families"]
    assert found["passed"] and not found["whole"]
    # as tests.smoke.join takes it
    assert {"command", "seconds", "commit", "gpu", "sglang"} <= set(found)


class Started:
    """A server that was started."""

    def __init__(self, stopped: list[str]) -> None:
        self._stopped = stopped

    def stop(self) -> None:
        self._stopped.append("plain")

    def log(self) -> str:
        return ""


@pytest.mark.parametrize("free", [50.0, 120.0])
def test_the_recipe_starts_as_soon_as_the_last_families_leave_it_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float
) -> None:
    """Its start takes a minute and a half: alone, it made the smoke test longer by as much."""
    told: list[str] = []
    starts, begun, compiled = threading.Event(), threading.Event(), threading.Event()

    def run_family(family: Family, **_: Any) -> dict[str, Any]:
        if family.name == "dflash2":
            starts.wait(10)
            told.append("last family has its servers")
            run.STARTED.add(family.name)
        elif family.is_compiled:
            compiled.wait(10)
            told.append("compiled")
        return FINE

    def run_group(cells: Any, _: Any, *, have_started: Any, **__: Any) -> Iterator[tuple[Any, Any]]:
        told.append("recipe starts")
        begun.set()
        have_started()
        told.append("recipe is asked")
        yield cells[0], {}

    def free_gib() -> float:
        # with too little memory, kernels are compiled before the recipe starts
        if free < run.RECIPE_GIB:
            compiled.set()
        return free

    monkeypatch.setattr(run, "STARTED", set())
    monkeypatch.setattr(run, "LOOK_S", 0.01)
    monkeypatch.setattr(run, "run_family", run_family)
    monkeypatch.setattr(run.recipes, "run_group", run_group)
    monkeypatch.setattr(run.gpu, "free_gib", free_gib)
    options = run.parse(["--out", str(tmp_path / "out.json")])
    options.families = ["llama", "dflash2", "qwen3-awq"]
    threading.Timer(0.1, starts.set).start()
    threading.Thread(target=lambda: (begun.wait(10), compiled.set())).start()
    with run.Progress(4, "parts") as progress:
        families, recipe = run.run_all(options, progress, lambda _: None)
    assert list(families) == options.families and list(recipe) == [run.RECIPE.key]
    assert told[0] == "last family has its servers" and told[-1] == "recipe is asked"
    assert (told.index("recipe starts") < told.index("compiled")) == (free > run.RECIPE_GIB)


def test_no_two_servers_meet_their_ranks_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve that SGLang 0.5.17 had started at once, one found its port taken."""
    monkeypatch.setattr(servers.Exact, "script", Path("/bin/echo"))
    found = []
    for _ in range(12):
        server = servers.Exact("--model-path", "M")
        assert server.wait_for_exit(60) == 0
        words = server.log().split()
        found += [words[words.index("--nccl-port") + 1], words[words.index("--port") + 1]]
        server.stop()
    assert len(set(found)) == 24


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A FlashInfer whose sampler a test writes, `flashinfer/sampling.py` in the folder, beside an
    SGLang that is imported at once."""
    (tmp_path / "sglang.py").touch()
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "flashinfer" / "sampling.py"


def test_the_sampler_is_compiled_while_servers_start(flashinfer: Path, tmp_path: Path) -> None:
    """All servers would wait for it at once: half a minute or more."""
    began = tmp_path / "began"
    flashinfer.write_text(
        "import pathlib, time\n"
        f"def get_sampling_module(): pathlib.Path({str(began)!r}).touch(); time.sleep(600)\n"
    )
    before = time.monotonic()
    with servers.compiling_sampler():
        while not began.exists():
            assert time.monotonic() - before < 60
            time.sleep(0.01)
    # it does not outlast the smoke test
    assert time.monotonic() - before < 60


def test_the_sampler_is_kept_where_servers_look_for_it(
    flashinfer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang 0.5.23 moves FlashInfer's folder: servers did not find what was compiled elsewhere."""
    (tmp_path / "sglang.py").unlink()
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    # of an SGLang that this process has imported for another test
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE", raising=False)
    says = "import os; print(os.environ.get('FLASHINFER_WORKSPACE_BASE'))"
    flashinfer.write_text(f"{says}\ndef get_sampling_module(): print('compiled')\n")
    command = [sys.executable, "-c", servers.SAMPLER]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    folder = tmp_path / "cache" if release.installed() == "0.5.23" else None
    assert ran.stdout == f"{folder}\ncompiled\n", ran.stderr


def test_a_sampler_that_cannot_be_compiled_is_told(
    flashinfer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flashinfer.write_text("def get_sampling_module(): raise RuntimeError('no nvcc')\n")
    with servers.compiling_sampler() as compiler:
        assert compiler and compiler.wait(60)
    assert "was not compiled ahead" in "".join(capsys.readouterr())


def test_texts_are_compared_while_the_deployed_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It compiles more kernels at start, and each server compiles others when it is first asked."""
    compared = threading.Event()

    class Slow(Started):
        start_s = 1.0

        def wait(self, *_: Any, **__: Any) -> None:
            assert compared.wait(10), "the other part waited for this server"

    class Quick(Slow):
        def wait(self, *_: Any, **__: Any) -> None:
            pass

    def check_texts(*_: Any, **__: Any) -> Iterator[tuple[str, dict[str, str]]]:
        assert FAMILIES[0].name not in run.STARTED
        compared.set()
        yield "plain", {"greedy": "ok"}

    def check_deployed(*_: Any, **__: Any) -> Iterator[tuple[str, dict[str, str]]]:
        assert FAMILIES[0].name in run.STARTED
        yield "deployed", {"greedy": "wrong"}

    def start(*_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        yield "plain", Quick([])
        yield "deployed", Slow([])

    monkeypatch.setattr(run, "STARTED", set())
    monkeypatch.setattr(run, "start", start)
    monkeypatch.setattr(run, "expected_worker", lambda *_, **__: {})
    monkeypatch.setattr(run.checks, "check_worker", lambda *_, **__: {})
    parts = {check_texts: ("plain", "exact"), check_deployed: ("deployed",)}
    monkeypatch.setattr(run, "PARTS", parts)
    found = run.run_family(FAMILIES[0])
    assert found["checks"] == {"plain": {"greedy": "ok"}, "deployed": {"greedy": "wrong"}}
    assert found["start_s"] == {"plain": 1.0, "deployed": 1.0}
    assert set(found["ask_s"]) == {"plain", "deployed"} and "error" not in found


def test_a_family_whose_servers_cannot_be_started_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that were started before would keep their memory from the other families."""
    stopped: list[str] = []
    first: Any = Started(stopped)

    def start(*_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        yield "plain", first
        raise SystemExit("Another server already answers")

    monkeypatch.setattr(run, "start", start)
    found = run.run_family(FAMILIES[0])
    assert "Another server already answers" in found["error"]
    assert stopped == ["plain"] and not run.RUNNING


@pytest.mark.parametrize(
    ("captured", "ran", "failed"),
    [(False, "False", []), (True, "True", []), (True, "False", ["prefills run in graphs"])],
)
def test_a_server_whose_prefills_leave_their_graphs_fails(
    captured: bool, ran: str, failed: list[str]
) -> None:
    """If this broke, DFLASH could cost a user SGLang's prefill graphs and nobody would see it."""
    lines = ["Capture target prefill CUDA graph end. elapsed=1.20 s"] * captured
    lines += [f"Prefill batch, #new-seq: 1, #new-token: 93, cuda graph: {ran}, #queue-req: 0"]
    server: Any = Started([])
    server.log = lambda: "\n".join([*lines, "Decode batch, cuda graph: True"])
    checked = run.checks.check_prefills(server)
    assert bool(checked) == captured
    assert [name for name, result in checked.items() if result != "ok"] == failed
