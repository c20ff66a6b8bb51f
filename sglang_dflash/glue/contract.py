"""The contract on each SGLang symbol: which of its parameters and attributes we rely on."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple


def names(text: str) -> tuple[str, ...]:
    """Split a whitespace-separated list of names, as the tables write long ones."""
    return tuple(text.split())


@dataclass(frozen=True)
class Symbol:
    """An SGLang symbol, and the parts of it that we rely on."""

    module: str
    # empty for the module itself
    attr: str
    # parameters that we pass by keyword, or fields of a dataclass
    uses: tuple[str, ...] = ()
    # attributes of an instance: methods, properties, fields, and names assigned to self
    attributes: tuple[str, ...] = ()
    # the first parameters, in order: we pass them positionally
    order: tuple[str, ...] = ()
    # all parameters, in order: SGLang passes them to our replacement
    takes: tuple[str, ...] | None = None
    # parts of its source, as `ast.unparse` prints them: calls, which show how SGLang calls us,
    # results that we take apart or replace, and attributes of others that it sets
    calls: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()

    @property
    def dotted(self) -> str:
        return f"sglang.{self.module}.{self.attr}".removesuffix(".")

    @property
    def known(self) -> set[str]:
        """Every parameter and attribute name in this entry."""
        others = {part.rpartition(".")[2] for part in self.sets}
        return {*self.uses, *self.attributes, *self.order, *(self.takes or ()), *others}

    @property
    def relied_on(self) -> str:
        """What we rely on, in one line; empty if only on its being there."""
        kinds = {
            "keywords": self.uses,
            "attributes": self.attributes,
            "first parameters": self.order,
            "parameters": self.takes or (),
            "calls": self.calls,
            "results": self.returns,
            "sets": self.sets,
        }
        return "; ".join(f"{kind} {', '.join(parts)}" for kind, parts in kinds.items() if parts)

    def resolve(self) -> Any:
        found = importlib.import_module(f"sglang.{self.module}")
        for part in self.attr.split(".") if self.attr else ():
            found = getattr(found, part)
        return found

    def lost(self) -> list[str]:
        """Return the parts that we rely on and the installed release no longer has.

        Raise ImportError or AttributeError if the symbol itself is gone.
        """
        found = self.resolve()
        lost = []
        if self.uses:
            has = _names_of(found)
            lost += [name for name in self.uses if name not in has]
        if self.attributes:
            # parsing the source is slow: only for names that the class itself does not have
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
        if self.calls or self.returns or self.sets:
            source = _source_of(found)
            lost += [f"the call {part}" for part in self.calls if part not in source.calls]
            lost += [f"the result {part}" for part in self.returns if part not in source.returns]
            lost += [f"what it sets, {part}" for part in self.sets if part not in source.sets]
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
        # dir() of an enum leaves its methods out
        names |= {*vars(kind), *vars(kind).get("__annotations__", ())}
    return names


def _assigned_by(found: type) -> set[str]:
    """Return the names that a class's methods assign to self, inherited methods included."""
    names: set[str] = set()
    for kind in inspect.getmro(found):
        # other classes, some without source, assign nothing that we use
        if kind.__module__.startswith("sglang."):
            names |= _assigned_in(kind.__module__).get(kind.__qualname__, set())
    return names


@functools.cache
def _assigned_in(module: str) -> dict[str, set[str]]:
    """Return the names that each class of a module assigns to self; cached, as parsing is slow."""
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


class Source(NamedTuple):
    """Parts of a class or function, as `ast.unparse` prints them."""

    calls: set[str]
    returns: set[str]
    sets: set[str]


def _source_of(found: Any) -> Source:
    found = inspect.unwrap(found)
    tree = ast.parse(inspect.getsource(sys.modules[found.__module__]))
    nodes = [node for part in _named(tree, found.__qualname__) for node in ast.walk(part)]
    return Source(
        {ast.unparse(node) for node in nodes if isinstance(node, ast.Call)},
        {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Return) and node.value},
        {
            ast.unparse(node)
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        },
    )


def _named(tree: ast.AST, qualname: str) -> list[ast.AST]:
    """Return the classes or functions of this name, of which the last is defined."""
    inside = [tree]
    for name in qualname.split("."):
        inside = [
            node
            for outer in inside
            for node in ast.walk(outer)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
    return inside
