"""No file in glue/ changes an SGLang object except through `changes`, so its list is complete.

The rule: a function changes only objects it made. These are literals, displays, comprehensions and
the results of operators, MAKERS and `Fields.edit`, under a name that is never bound to anything
else, and `self` and the objects its class made. Anything else that is changed is SGLang's, or named
in OURS.

Setting or deleting an attribute or an item, `+=` and the methods in MUTATORS are changes. Writing
into a tensor through its methods or kernels is data, not a change.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dflash.testing.server import ROOT

GLUE = ROOT / "sglang_dflash" / "glue"
# changes.py changes SGLang; path/ is imported before SGLang and replaces packages that are missing
SOURCES = [
    path
    for path in sorted(GLUE.rglob("*.py"))
    if path != GLUE / "changes.py" and GLUE / "cpu" / "path" not in path.parents
]
# file -> objects that are ours although the rule does not recognise them
OURS = {
    "compat.py": {"globals()": "this module's own names"},
    "after_step/stage_clock.py": {
        "step": "a _Step of ours",
        "step.marks": "its list",
        "self._current.waits": "its list",
    },
    "models/embedding.py": {"rows": "a tensor that was made here"},
    "models/gemma4_layers.py": {"following": "the FusedLayer after this one"},
    "sampling/penalties.py": {
        "sums": "our PenaltyState, which has a method of that name",
        "logits": "a tensor of one step",
    },
    "seams/__init__.py": {"globals()": "this module's own names"},
    "seams/sglang_0_5_17.py": {"server_args": "for changes.Settings, which lists what it writes"},
    "programs/server.py": {"sys": "Python's own arguments"},
    "step/graph_outputs.py": {
        "outputs.choices": "a buffer of ours",
        "outputs.drafts": "a buffer of ours",
    },
}
MAKERS = {"Counter", "deque", "dict", "list", "set", "WeakKeyDictionary"}
TENSOR_MAKERS = {"zeros"}
MUTATORS = {
    *("append", "extend", "insert", "remove", "clear", "sort", "reverse", "pop", "popitem"),
    *("add", "discard", "update", "setdefault", "appendleft"),
    *("__setattr__", "__delattr__", "__setitem__", "__delitem__"),
}
# prefixes of the SGLang functions in compat that add to one of its tables
REGISTERS = ("add_", "register_")

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = ast.Module | Function


def changed(tree: ast.AST) -> Iterator[tuple[Scope, ast.expr, ast.AST]]:
    """Yield every change below a tree: the innermost function, the object, the node."""
    yield from _changed(tree, tree)  # type: ignore[arg-type]


def _changed(node: ast.AST, scope: Scope) -> Iterator[tuple[Scope, ast.expr, ast.AST]]:
    if isinstance(node, Function):
        scope = node
    found: ast.expr | None = None
    match node:
        case (
            ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del())
        ):
            found = node.value
        case ast.AugAssign(target=ast.Name()):
            found = ast.Name(node.target.id)
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
            found = owner
        case ast.Call(func=ast.Attribute(value=ast.Name(id="object")), args=[owner, *_]):
            found = owner
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in MUTATORS:
            found = owner
        case ast.Call(func=ast.Attribute(value=ast.Name(id="compat") as owner, attr=name)):
            found = owner if name.startswith(REGISTERS) else None
    if found is not None:
        yield scope, found, node
    for child in ast.iter_child_nodes(node):
        yield from _changed(child, scope)


class Module:
    """A file, and which of its names are bound to objects it made."""

    def __init__(self, source: str, ours: dict[str, str]) -> None:
        self.tree = ast.parse(source)
        self.ours = ours
        self.used: set[str] = set()
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    def violations(self) -> list[str]:
        return [
            f"{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
            for scope, owner, node in changed(self.tree)
            if not self._is_ours(owner, scope)
        ]

    def _is_ours(self, owner: ast.expr, scope: Scope) -> bool:
        text = ast.unparse(owner)
        if text in self.ours:
            self.used.add(text)
            return True
        if isinstance(owner, ast.Subscript):
            return self._is_ours(owner.value, scope)
        if isinstance(owner, ast.Call):
            return _is_made(owner)
        if isinstance(owner, ast.Attribute):
            is_own = isinstance(owner.value, ast.Name) and owner.value.id == "self"
            return is_own and _all_made(self._values(self._above(scope, ast.ClassDef), text))
        return isinstance(owner, ast.Name) and (
            text == "self" or _all_made(self._values(self._binder(text, scope), text))
        )

    def _above(self, node: ast.AST, kind: type[ast.AST]) -> ast.AST:
        while not isinstance(node, kind | ast.Module):
            node = self.parents[node]
        return node

    def _binder(self, name: str, scope: ast.AST) -> ast.AST:
        """Return the innermost enclosing function that binds a name, or else the module."""
        while isinstance(scope, Function) and not list(self._values(scope, name)):
            scope = self.parents[scope]
            while not isinstance(scope, Scope):
                scope = self.parents[scope]
        return scope

    def _values(self, scope: ast.AST, target: str) -> Iterator[ast.expr | None]:
        """Yield the values bound to a name or an attribute of self; None for unknown values."""
        for node in ast.walk(scope):
            if isinstance(node, Function) and node is scope:
                yield from (None for arg in ast.walk(node.args) if _argument(arg) == target)
            elif isinstance(node, ast.Assign):
                for each in node.targets:
                    yield from _matches(each, node.value, target)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                yield from _matches(node.target, node.value, target)
            elif isinstance(node, ast.For | ast.comprehension):
                yield from _matches(node.target, None, target)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                yield from _matches(node.optional_vars, None, target)
            elif isinstance(node, ast.NamedExpr):
                yield from _matches(node.target, node.value, target)


def _argument(node: ast.AST) -> str | None:
    return node.arg if isinstance(node, ast.arg) else None


def _matches(bound: ast.expr, value: ast.expr | None, target: str) -> Iterator[ast.expr | None]:
    if isinstance(bound, ast.Tuple):
        parts: list[ast.expr | None] = [None] * len(bound.elts)
        if isinstance(value, ast.Tuple) and len(value.elts) == len(bound.elts):
            parts = list(value.elts)
        for each, part in zip(bound.elts, parts, strict=True):
            yield from _matches(each, part, target)
    elif ast.unparse(bound) == target:
        yield value


def _all_made(values: Iterator[ast.expr | None]) -> bool:
    found = list(values)
    return bool(found) and all(value is not None and _is_made(value) for value in found)


def _is_made(value: ast.expr) -> bool:
    match value:
        case ast.Constant() | ast.List() | ast.Dict() | ast.Set():
            return True
        case ast.ListComp() | ast.DictComp() | ast.SetComp():
            return True
        case ast.BinOp(left=left, right=right):
            return _is_made(left) and _is_made(right)
        case ast.Call(func=ast.Name(id=name)):
            return name in MAKERS
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
            return name in TENSOR_MAKERS
        case ast.Call(func=ast.Attribute(attr="new_empty" | "edit" | "fromkeys")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="copy"), attr="copy")):
            return True
    return False


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(GLUE)))
def test_only_changes_py_changes_sglang(path: Path) -> None:
    """A change made elsewhere would be missing from the list, which claims to be complete."""
    ours = OURS.get(str(path.relative_to(GLUE)), {})
    module = Module(path.read_text(), ours)
    assert module.violations() == [], "go through sglang_dflash.glue.changes, with a reason"
    assert module.used == set(ours), "OURS names what is not changed any more"


SEEDED = {
    "attribute": "def f(req):\n    req.seen = 1",
    "attribute of an attribute": "def f(req):\n    req.sampling_params.min_p = 0.0",
    "attribute of what self holds": "class A:\n  def f(self):\n    self._backend.forward = self.f",
    "tuple": "def f(output):\n    features, output.hidden = output.hidden, None",
    "augmented": "def f(configurator):\n    configurator._cell_size += 8",
    "augmented alias": "def f(req):\n    ids = req.output_ids\n    ids += [1]",
    "item": "def f(meta_info):\n    meta_info['dflash'] = {}",
    "item of a class": "def f():\n    compat.ModelRegistry.models['D'] = 1",
    "setattr": "def f(args):\n    setattr(args, 'device', 'cpu')",
    "past __setattr__": "def f(args):\n    object.__setattr__(args, 'device', 'cpu')",
    "past the class": "def f(args):\n    vars(args)['device'] = 'cpu'",
    "delete": "def f(weight):\n    del weight.packed",
    "slice": "def f(req):\n    del req.output_ids[-1:]",
    "append": "def f(runner):\n    runner.capture_tail_hooks.append(f)",
    "append through an alias": "def f(req):\n    ids = req.output_ids\n    ids.append(1)",
    "append to a name of two lives": "def f(req):\n    ids = []\n    ids = req.ids\n    ids.pop()",
    "closure": "def f(backend):\n  def g():\n    backend.mask = None\n  return g",
    "list that self was given": (
        "class A:\n  def __init__(self, r):\n    self.l = r.hooks\n  def f(self):\n    self.l.pop()"
    ),
    "loop": "def f(reqs):\n    for req in reqs:\n        req.step += 1",
    "register": "def f():\n    compat.add_choices(['cpu'])",
}


@pytest.mark.parametrize("source", SEEDED.values(), ids=SEEDED)
def test_a_seeded_change_is_found(source: str) -> None:
    assert len(Module(source, {}).violations()) == 1


def test_what_a_function_made_is_not_reported() -> None:
    source = """
        KNOWN = {}

        class A:
            def __init__(self, req):
                self.req = req
                self.open = []
                self.buffer = req.weight.new_empty(3)

            def f(self, req):
                self.req = None
                self.open.append(req)
                self.buffer[:2] = 1
                KNOWN[req] = 1
                rows, count = [], 0
                count += 1
                rows.append(count)
                own = copy.copy(req)
                own.seen = True
                ids = FIELDS.edit(req, "output_ids")
                ids.append(1)
                del FIELDS.edit(req, "output_ids")[-1:]
    """
    assert Module(textwrap.dedent(source), {}).violations() == []
