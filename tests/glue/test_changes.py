"""Changes made to SGLang through `changes` take effect and are listed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.glue import changes, compat, plugin
from sglang_dflash.glue.step.worker import DFlashWorker


@pytest.fixture(autouse=True)
def own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_made", dict(changes._made))


def reasons(target: str) -> dict[str, Any]:
    return {c["name"]: c["why"] for c in changes.listed() if c["target"] == target}


def test_every_hook_is_listed_with_its_reason() -> None:
    listed = {f"{c['target']}.{c['name']}": c["why"] for c in changes.listed()}
    for name, hook in plugin.hooks().items():
        assert listed[compat.SYMBOLS[name].dotted] == hook.why


def test_fields_are_listed_before_they_are_written() -> None:
    """Arguments are resolved, and answers written, in other processes than the list's."""
    assert DFlashWorker is not None
    assert reasons("ServerArgs")["speculative_num_steps"] == "a block is drafted in one step"
    assert reasons("meta_info") == {"dflash": "a response reports its own acceptance"}


def test_equal_changes_of_several_objects_are_one_with_their_number() -> None:
    class Layer:
        forward: Any = None

    layers = [Layer(), Layer(), Layer()]
    for layer in layers:
        changes.replace(layer, "forward", len, why="a test")
    assert all(layer.forward is len for layer in layers)
    found = [c for c in changes.listed() if c["target"] == "Layer"]
    assert found == [{"target": "Layer", "name": "forward", "why": "a test", "count": 3}]


def test_lists_and_tables_of_an_object_grow() -> None:
    class Runner(SimpleNamespace):
        pass

    runner = Runner(hooks=[1], models={})
    changes.append_to(runner, "hooks", 2, why="a test")
    changes.enter(runner, "models", "A", int, why="another")
    assert runner.hooks == [1, 2] and runner.models == {"A": int}
    assert reasons("Runner") == {"hooks": "a test", "models['A']": "another"}


def test_what_is_replaced_for_a_while_comes_back() -> None:
    class Frozen:
        def name(self) -> str:
            return "own"

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    frozen = Frozen()
    with pytest.raises(KeyError), changes.replaced(frozen, "name", lambda: "ours", why="a test"):
        assert frozen.name() == "ours"
        raise KeyError
    assert frozen.name() == "own"
    assert reasons("Frozen") == {"name": "a test"}


def test_a_field_that_was_not_declared_is_not_written() -> None:
    fields = changes.Fields("Thing", {"size": "a test"})
    thing = SimpleNamespace(size=1, name="a")
    fields.write(thing, size=2)
    with pytest.raises(AssertionError, match="not declared for Thing: name"):
        fields.write(thing, name="b")
    assert (thing.size, thing.name) == (2, "a")


def test_log_counts_and_lists(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger=changes.logger.name):
        changes.log()
    first, *lines = caplog.messages
    assert first.startswith(f"sglang_dflash changes SGLang in {len(lines)} places")
    assert "ServerArgs.speculative_eagle_topk (1): a block is one chain" in lines
