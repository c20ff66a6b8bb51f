"""The plug-in attaches or the process exits; SGLang's own DFLASH never runs by accident."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from sglang_dflash.environment import Environment
from sglang_dflash.glue import changes, compat, plugin, release
from sglang_dflash.glue.contract import Symbol
from sglang_dflash.glue.step.worker import DFlashWorker


def test_entry_point_is_the_one_sglang_loads() -> None:
    found = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "sglang_dflash"]
    assert [e.value for e in found] == ["sglang_dflash.glue.plugin:activate"]
    assert found[0].load() is plugin.activate


def test_dflash_creates_our_worker_and_others_keep_theirs() -> None:
    algorithm = compat.SpeculativeAlgorithm
    assert algorithm.from_string("DFLASH").create_worker(None) is DFlashWorker
    eagle = algorithm.from_string("EAGLE").create_worker(
        SimpleNamespace(enable_multi_layer_eagle=False)
    )
    assert eagle.__name__ == "EAGLEWorkerV2"


def test_worker_is_no_subclass_of_the_in_tree_one() -> None:
    assert [c.__name__ for c in DFlashWorker.__mro__[1:]] == ["BaseSpecWorker", "ABC", "object"]


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "installed", lambda: "0.5.19")
    with pytest.raises(SystemExit) as ended:
        plugin.activate()
    assert str(ended.value) == (
        "sglang_dflash needs sglang 0.5.17 or 0.5.23 but found 0.5.19. Install sglang==0.5.23 or "
        "sglang==0.5.17, or a sglang_dflash release for 0.5.19, or set SGLANG_DFLASH=off to use "
        "SGLang's own DFLASH."
    )


def test_hook_that_does_not_attach_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs a failed hook and continues; we must not."""
    gone = Symbol("srt.speculative.spec_info", "no_such_function")
    monkeypatch.setitem(compat.SYMBOLS, "gone", gone)
    hook = changes.Hook(lambda original: None, "a test")
    monkeypatch.setattr(plugin, "hooks", lambda: {"gone": hook})
    with pytest.raises(SystemExit, match="these hooks did not attach: gone.*Nothing was served"):
        plugin.activate()


def test_exception_while_attaching_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, object]:
        raise ImportError("no such thing")

    monkeypatch.setattr(plugin, "hooks", broken)
    with pytest.raises(SystemExit, match="could not attach to SGLang: no such thing"):
        plugin.activate()


def test_switch_is_read_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Environment({}).plugin_is_on and Environment({"SGLANG_DFLASH": "on"}).plugin_is_on
    assert not Environment({"SGLANG_DFLASH": "off"}).plugin_is_on
    monkeypatch.setenv("SGLANG_DFLASH", "0")
    with pytest.raises(SystemExit, match="SGLANG_DFLASH=0 is neither on nor off"):
        plugin.activate()


@pytest.mark.parametrize(
    ("switch", "ours"), [pytest.param("on", True, marks=pytest.mark.long), ("off", False)]
)
def test_switch_decides_whose_worker_runs(switch: str, ours: bool) -> None:
    """In a fresh process, through SGLang's own loader."""
    script = (
        f"import os; os.environ['SGLANG_DFLASH'] = '{switch}'\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as A\n"
        "print('worker:', A.DFLASH.create_worker(None).__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    in_tree = "sglang.srt.speculative.dflash_worker_v2"
    expected = "sglang_dflash.glue.step.worker" if ours else in_tree
    assert f"worker: {expected}" in done.stdout
