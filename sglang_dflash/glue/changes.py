"""Every monkey patch of SGLang goes through this module, and is listed with its reason.

- `attach` hooks SGLang's functions, in every process that it starts.
- `replace`, `replaced`, `append_to`, `enter` and `register` change one object, once: a method, a
  size, a table.
- `Fields` are attributes that our code writes while arguments are resolved and steps run. They are
  declared at import, so that the list is the same before and after the first request.

`listed()` returns the list. No other file in glue/ may assign to an SGLang object; a test scans the
source for violations. Kernel writes into SGLang's tensors are data, and not listed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from sglang_dflash.glue import compat, release, seams

logger = logging.getLogger(__name__)


class Change(NamedTuple):
    """One changed attribute of SGLang, and why."""

    target: str
    name: str
    why: str


class Hook(NamedTuple):
    """A wrapper around a function of SGLang, which it gets as its first argument."""

    function: Callable[..., Any]
    why: str


# change -> number of objects it was made to
_made: dict[Change, int] = {}


def attach(hooks: Mapping[str, Hook]) -> None:
    """Apply hooks, keyed by symbol, now; raise RuntimeError unless every one took effect."""
    registry = compat.HookRegistry
    for name, hook in hooks.items():
        registry.register(compat.SYMBOLS[name].dotted, hook.function, compat.HookType.AROUND)
    registry.apply_hooks()
    lost = [name for name in hooks if compat.SYMBOLS[name].dotted not in registry._patched]
    if lost:
        raise RuntimeError(f"these hooks did not attach: {', '.join(lost)}")
    for name, hook in hooks.items():
        target, _, attribute = compat.SYMBOLS[name].dotted.rpartition(".")
        _made[Change(target, attribute, hook.why)] = 1
    logger.info("sglang_dflash attached to SGLang %s", release.installed())


def replace(owner: Any, name: str, value: Any, *, why: str) -> None:
    """Set an attribute of one object."""
    _count(owner, name, why)
    setattr(owner, name, value)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any, *, why: str) -> Iterator[None]:
    """Shadow an attribute of one object within the context, bypassing its class's `__setattr__`."""
    _count(owner, name, why)
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        own.update(before)


def append_to(owner: Any, name: str, item: Any, *, why: str) -> None:
    """Append to a list of one object."""
    _count(owner, name, why)
    getattr(owner, name).append(item)


def register(name: str, *arguments: Any, why: str) -> Any:
    """Call one of SGLang's own registration functions; return its result."""
    target, _, function = compat.SYMBOLS[name].dotted.rpartition(".")
    _made[Change(target, f"{function}{arguments}", why)] = 1
    return getattr(compat, name)(*arguments)


def enter(table: Any, name: str, key: str, value: Any, *, why: str) -> None:
    """Add to a dict of one object that has no registration function."""
    _made[Change(_name_of(table), f"{name}[{key!r}]", why)] = 1
    getattr(table, name)[key] = value


class Fields:
    """Fields of SGLang's objects that our code writes: name -> why."""

    def __init__(self, target: str, reasons: Mapping[str, str]) -> None:
        self.target = target
        self.names = frozenset(reasons)
        for name, why in reasons.items():
            _made[Change(target, name, why)] = 1

    def write(self, owner: Any, **values: Any) -> None:
        """Set attributes."""
        # once, and not name by name: this runs for every request of a step
        assert values.keys() <= self.names, self._undeclared(values)
        for name, value in values.items():
            setattr(owner, name, value)

    def delete(self, owner: Any, name: str) -> None:
        """Delete an attribute."""
        delattr(owner, self._declared(name))

    def put(self, owner: dict[str, Any], **values: Any) -> None:
        """Set keys of a dict."""
        for name, value in values.items():
            owner[self._declared(name)] = value

    def edit(self, owner: Any, name: str) -> Any:
        """Return a list, dict or array of an object, to be changed in place."""
        return getattr(owner, self._declared(name))

    def _declared(self, name: str) -> str:
        assert name in self.names, self._undeclared([name])
        return name

    def _undeclared(self, names: Iterable[str]) -> str:
        new = ", ".join(name for name in names if name not in self.names)
        return f"not declared for {self.target}: {new}. Declared: {', '.join(sorted(self.names))}"


class Settings(Fields):
    """Server arguments that our code decides; how they are written depends on the release."""

    def write(self, owner: Any, **values: Any) -> None:
        """Decide server arguments."""
        seams.decide(owner, **{self._declared(name): value for name, value in values.items()})


def listed() -> list[dict[str, Any]]:
    """Return every change so far; the same change to several objects is one entry with a count."""
    return [
        change._asdict() if count == 1 else {**change._asdict(), "count": count}
        for change, count in sorted(_made.items())
    ]


def log() -> None:
    """Log the number of changes, and each change at debug level."""
    logger.info(
        "sglang_dflash changes SGLang in %d places, listed in /server_info under "
        "sglang_dflash.changes and in the log at debug level.",
        len(_made),
    )
    for change, count in sorted(_made.items()):
        logger.debug("%s.%s (%d): %s", change.target, change.name, count, change.why)


def _count(owner: Any, name: str, why: str) -> None:
    change = Change(_name_of(owner), name, why)
    _made[change] = _made.get(change, 0) + 1


def _name_of(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, type | ModuleType) else type(owner).__name__
