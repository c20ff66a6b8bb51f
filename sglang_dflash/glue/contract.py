"""How a name in SGLang is held to what we use of it."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Symbol:
    """A name in SGLang, and what of it we rely on."""

    module: str
    attr: str
    # parameters, or fields of a dataclass
    uses: tuple[str, ...] = ()
    # what an instance of the class has: methods, properties, and what its methods assign to self
    attributes: tuple[str, ...] = ()

    @property
    def dotted(self) -> str:
        return f"sglang.{self.module}.{self.attr}"

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
        lost = [name for name in self.uses if name not in _names_of(found)]
        if self.attributes:
            has = _attributes_of(found)
            lost += [name for name in self.attributes if name not in has]
        return lost


def _names_of(found: Any) -> set[str]:
    names = set(inspect.signature(found).parameters)
    if inspect.isclass(found):
        names |= set(getattr(found, "__dataclass_fields__", ()))
    return names


def _attributes_of(found: type) -> set[str]:
    names = set(dir(found)) | set(getattr(found, "__dataclass_fields__", ()))
    for kind in inspect.getmro(found):
        # classes without source assign nothing that we use
        if kind.__module__.startswith("sglang."):
            names |= _assigned_to_self(textwrap.dedent(inspect.getsource(kind)))
    return names


def _assigned_to_self(source: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
