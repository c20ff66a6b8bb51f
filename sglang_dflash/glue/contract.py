"""How a name in SGLang is held to what we use of it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import Any


def names(text: str) -> tuple[str, ...]:
    """Return the words of a text, as the tables write many names."""
    return tuple(text.split())


@dataclass(frozen=True)
class Symbol:
    """A name in SGLang, and what of it we rely on."""

    module: str
    attr: str
    # parameters that we name, or fields of a dataclass
    uses: tuple[str, ...] = ()
    # what an instance of the class has: methods, properties, fields, and what is assigned to self
    attributes: tuple[str, ...] = ()
    # the first parameters, in order: we pass them by position
    order: tuple[str, ...] = ()
    # all parameters, in order: SGLang passes them to what stands in for the name
    takes: tuple[str, ...] | None = None
    # calls in the source, written as `ast.unparse` does: SGLang calls us so
    calls: tuple[str, ...] = ()

    @property
    def dotted(self) -> str:
        return f"sglang.{self.module}.{self.attr}"

    @property
    def known(self) -> set[str]:
        """Every name that the contract has of it."""
        return {*self.uses, *self.attributes, *self.order, *(self.takes or ())}

    def resolve(self) -> Any:
        found = importlib.import_module(f"sglang.{self.module}")
        for part in self.attr.split("."):
            found = getattr(found, part)
        return found

    def lost(self) -> list[str]:
        """Return what we rely on and the installed release no longer has.

        Raise ImportError or AttributeError if the name itself is gone.
        """
        found = self.resolve()
        lost = []
        if self.uses:
            has = _names_of(found)
            lost += [name for name in self.uses if name not in has]
        if self.attributes:
            # sources are long: only for what the class itself does not have
            missing = [name for name in self.attributes if name not in _declared_by(found)]
            assigned = _assigned_by(found) if missing else set()
            lost += [name for name in missing if name not in assigned]
        if self.order:
            given = _parameters_of(found)[: len(self.order)]
            if given != self.order:
                lost.append(f"the order ({', '.join(self.order)}): it has ({', '.join(given)})")
        if self.takes is not None:
            given = _parameters_of(found)
            if given != self.takes:
                wanted = ", ".join(self.takes)
                lost.append(f"the parameters ({wanted}): it has ({', '.join(given)})")
        if self.calls:
            made = _calls_of(found)
            lost += [f"the call {call}" for call in self.calls if call not in made]
        return lost


def _parameters_of(found: Any) -> tuple[str, ...]:
    parameters = tuple(inspect.signature(found).parameters)
    return parameters[1:] if parameters[:1] in (("self",), ("cls",)) else parameters


def _names_of(found: Any) -> set[str]:
    names = set(inspect.signature(found).parameters)
    if inspect.isclass(found):
        names |= set(getattr(found, "__dataclass_fields__", ()))
    return names


def _declared_by(found: type) -> set[str]:
    names = set(dir(found)) | set(getattr(found, "__dataclass_fields__", ()))
    for kind in inspect.getmro(found):
        # dir() of an enumeration leaves its methods out
        names |= {*vars(kind), *vars(kind).get("__annotations__", ())}
    return names


def _assigned_by(found: type) -> set[str]:
    """Return what methods of a class assign to self, inherited ones included."""
    names: set[str] = set()
    for kind in inspect.getmro(found):
        # classes without source assign nothing that we use
        if kind.__module__.startswith("sglang."):
            names |= _assigned_in(kind.__module__).get(kind.__qualname__, set())
    return names


@functools.cache
def _assigned_in(module: str) -> dict[str, set[str]]:
    """Return what each class of a module assigns to self; parsing takes a while."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {kind.name: _assigned_to_self(kind) for kind in _classes(tree)}


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _assigned_to_self(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr="register_buffer"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
    return found


def _calls_of(found: type) -> set[str]:
    tree = ast.parse(inspect.getsource(sys.modules[found.__module__]))
    return {
        ast.unparse(node)
        for kind in _classes(tree)
        if kind.name == found.__qualname__
        for node in ast.walk(kind)
        if isinstance(node, ast.Call)
    }
