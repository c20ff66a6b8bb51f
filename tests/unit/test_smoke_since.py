"""`make test` lists the serving-path files changed since the last smoke test on a GPU."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

from sglang_dflash.glue import release
from tests.smoke import since
from tests.smoke.families import FAMILIES
from tests.smoke.join import join
from tests.unit.test_architecture import MODULES, PACKAGE, imports_of, modules_of

SERVING = ("sglang_dflash/glue/step/worker.py", "sglang_dflash/step.py")
BESIDE = ("sglang_dflash/commands/report.py", "sglang_dflash/train/loss.py", "README.md")


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit at which the smoke test passed."""
    monkeypatch.setattr(since, "ROOT", tmp_path)
    monkeypatch.setattr(since, "RESULTS", tmp_path)
    for name in (*SERVING, *BESIDE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "first")
    keep(tmp_path / "smoke-h200.json", git(tmp_path, "rev-parse", "HEAD"), release="0.5.23")
    return tmp_path


def keep(file: Path, commit: str, *, release: str) -> None:
    found = {"commit": commit, "passed": True, "gpu": "NVIDIA H200", "sglang": release}
    found |= {"whole": True}
    file.write_text(json.dumps(found))


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_serving_code_is_named(history: Path) -> None:
    for name in SERVING:
        (history / name).write_text("after\n")
    assert since.report().splitlines()[1:] == [*SERVING]


def test_a_part_does_not_read_as_a_pass(history: Path) -> None:
    """One family that passed would otherwise stand for all of them."""
    result = json.loads((history / "smoke-h200.json").read_text())
    result |= {"whole": False, "families": {"gemma4": FINE, "llama": FINE}}
    (history / "smoke-h200.json").write_text(json.dumps(result))
    assert "smoke: passed in part (only gemma4, llama) on NVIDIA H200" in since.report()


def test_what_a_cut_off_run_left_is_no_result(history: Path) -> None:
    before = since.report()
    keep(history / "smoke-h200.part.json", "abc", release="0.5.23")
    assert since.report() == before


def imported_from(starts: set[str]) -> set[str]:
    """Return the modules that these import, when loaded or later, and their packages."""
    found: set[str] = set()
    waiting = starts
    while waiting:
        waiting |= {name.rpartition(".")[0] for name in waiting} & set(MODULES)
        found |= waiting
        waiting = set().union(*(modules_of(imports_of(MODULES[n])) for n in waiting)) - found
    return found


def test_the_serving_path_is_what_a_server_imports() -> None:
    """The list is of what does not count, so that a new file does."""
    # SGLang loads the plug-in, and the plug-in one of these by its name
    served = [f"sglang_{version.replace('.', '_')}" for version in release.SERVED]
    starts = {"sglang_dflash.glue.plugin", *(f"sglang_dflash.glue.seams.{n}" for n in served)}
    # what recipes run first (launch/serve.sh, launch/gemma4-31b-32gb.sh)
    starts |= {f"sglang_dflash.commands.{name}" for name in ("serve", "plain_towers")}
    # each command loads its module itself; the options of training serve nothing
    main = PACKAGE / "__main__.py"
    at_the_top = [n for n in ast.parse(main.read_text()).body if isinstance(n, ast.ImportFrom)]
    shared = {str(node.module) for node in at_the_top} & set(MODULES)
    shared = {name for name in shared if not name.startswith("sglang_dflash.train")}
    imported = {MODULES[name] for name in imported_from(starts | shared)} | {main}
    listed = git(since.ROOT, "ls-files", "-co", "--exclude-standard", "--", *since.SERVING_PATH)
    files = {since.ROOT / name for name in listed.split() if name.endswith(".py")}
    files = {path for path in files if path.exists()}
    # kept in BESIDE of tests/smoke/since.py
    assert (files - imported, imported - files) == (set(), set())


def test_training_and_words_are_not_the_serving_path(history: Path) -> None:
    for name in BESIDE:
        (history / name).write_text("after\n")
    assert since.report().endswith("unchanged since.")


def test_each_release_has_its_result_and_a_commit_of_another_history_is_said(history: Path) -> None:
    keep(history / "smoke-0.5.17-h200.json", "0" * 40, release="0.5.17")
    older, newer = since.report().splitlines()
    assert "SGLang 0.5.17" in older and "is not in this history" in older
    assert "SGLang 0.5.23" in newer and newer.endswith("unchanged since.")


def test_without_a_result_the_smoke_is_asked_for(history: Path) -> None:
    (history / "smoke-h200.json").unlink()
    assert "make smoke" in since.report()


# a result of several calls

FINE = {"checks": {"exact": {"greedy": "ok"}}}
WRONG = {"checks": {"exact": {"greedy": "3 of 12 differ"}}, "logs": {"exact": "a log"}}


def call(commit: str = "abc", **parts: dict[str, object]) -> dict[str, object]:
    return {"commit": commit, "sglang": "0.5.23", "command": "smoke", "seconds": 5.0, **parts}


def test_calls_are_joined_and_a_later_one_replaces_a_family() -> None:
    names = [family.name for family in FAMILIES]
    first = call(families={name: WRONG for name in names[:4]})
    assert join([first])["passed"] is False and since.failed(join([first])) == names[:4]
    second = call(families={name: FINE for name in names}, recipe={"31B": FINE})
    joined = join([first, second])
    assert joined["passed"] and joined["whole"] and joined["seconds"] == 10
    assert "logs" not in str(join([first]))


def test_a_family_that_is_missing_makes_a_result_partial() -> None:
    assert join([call(families={"gemma4": FINE}, recipe={"31B": FINE})])["whole"] is False


def test_an_error_is_a_failure_and_keeps_its_first_line() -> None:
    joined = join([call(families={"llama": {"error": "RuntimeError: it ended\nTraceback"}})])
    assert joined["passed"] is False
    assert joined["families"]["llama"]["error"] == "RuntimeError: it ended"


def test_calls_at_different_commits_are_not_joined() -> None:
    with pytest.raises(SystemExit, match="commit differ"):
        join([call(families={}), call("def", families={})])


def test_what_failed_is_named(history: Path) -> None:
    result = json.loads((history / "smoke-h200.json").read_text())
    result |= {"passed": False, "families": {"gemma4": FINE, "llama": WRONG}}
    (history / "smoke-h200.json").write_text(json.dumps(result))
    assert "FAILED (llama) on" in since.report()
