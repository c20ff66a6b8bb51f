"""The rules of the architecture, checked against the source."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_dflash.testing.server import ROOT

PACKAGE = ROOT / "sglang_dflash"
STAND_INS = PACKAGE / "glue" / "cpu" / "path"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if STAND_INS not in path.parents)
GLUE = [
    path
    for path in SOURCES
    if PACKAGE / "glue" in path.parents and path != PACKAGE / "glue" / "__init__.py"
]

PROGRAMS = sorted(
    path for folder in ("benchmarks", "launch", "tests") for path in (ROOT / folder).rglob("*.py")
)

# one folder per op family, with the torch twins in reference.py next to the Triton kernels;
# logits is shared by several families
OP_FAMILIES = {
    *("kernels/accept", "kernels/attention", "kernels/block", "kernels/context"),
    *("kernels/gemma_layer", "kernels/logits", "kernels/rows", "kernels/sampling"),
}
# what each part may import from the package; parts not listed may import anything
ALLOWED = {
    "types": set(),
    "safetensors_header": set(),
    "checkpoint": {"safetensors_header"},
    "dflash2_format": set(),
    "mask_embedding": set(),
    "speculators_format": {"dflash2_format"},
    "released_drafters": set(),
    "released_pairs": set(),
    "drafter_config": {"dflash2_format", "speculators_format"},
    "environment": set(),
    "heartbeat": set(),
    "command_help": set(),
    "interrupt": set(),
    "config": {
        "dflash2_format",
        "drafter_config",
        "environment",
        "mask_embedding",
        "safetensors_header",
    },
    "draft_backends": {"config", "drafter_config"},
    "fp8_drafter": {"config"},
    "metrics": {"environment"},
    # the server harness sums the meter's counts
    "testing": {"metrics", "testing"},
    "host": {"types"},
    "buffers": {"kernels", "types"},
    # kernels/__init__.py chooses one implementation of every op
    "kernels": {"kernels", *OP_FAMILIES},
    **{family: {"kernels", "kernels/logits", family} for family in OP_FAMILIES},
    # rejection sampling leaves counting matches to acceptance
    "kernels/sampling": {"kernels", "kernels/accept", "kernels/logits", "kernels/sampling"},
    "policy": {"types"},
    "simulate": set(),
    "costs": {"host_times"},
    "confidence": set(),
    "host_times": set(),
    "survival": set(),
    "width": {"confidence", "costs", "host_times", "survival"},
    "draft": {"buffers", "config", "host", "kernels", "policy", "types"},
    "verify": {"host", "types"},
    "accept": {"kernels", "types"},
    "commit": {"host", "policy", "types"},
    "step": {
        "accept",
        "buffers",
        "commit",
        "config",
        "draft",
        "host",
        "kernels",
        "policy",
        "simulate",
        "types",
        "verify",
    },
    # commands reach SGLang through the adapter, which knows none of them
    "commands": {
        "checkpoint",
        "commands",
        "config",
        "draft_backends",
        "drafter_config",
        "environment",
        "fp8_drafter",
        "glue",
        "kernels",
        "metrics",
        "mask_embedding",
        "reference",
        "released_drafters",
        "released_pairs",
        "safetensors_header",
        "speculators_format",
        # tune starts servers
        "testing",
        "train",
    },
    "__main__": {"__version__", "command_help", "commands", "interrupt", "train"},
    # an oracle shares no arithmetic with the code it judges, only the list of accepted configs
    "reference": {
        "dflash2_format",
        "drafter_config",
        "mask_embedding",
        "reference",
        "speculators_format",
    },
    "pairs": {"command_help", "environment", "interrupt", "pairs"},
    # the trainer is for any target: it knows neither the shipped pairs nor the tiny one's corpus
    "train": {"command_help", "interrupt", "mask_embedding", "reference", "train"},
    # templates and tables; prompts and chats are generated without torch, so without the trainer
    "pairs/tiny_corpus": {"pairs/tiny_corpus"},
    "pairs/save": {"reference"},
    "pairs/release_file": {"__version__", "command_help", "environment", "interrupt", "pairs"},
    # the two programs that evaluate and make the tiny pair, with the trainer
    "pairs/evaluate_tiny": {
        "command_help",
        "interrupt",
        "pairs/tiny_corpus",
        "reference",
        # the progress bar
        "testing",
        "train",
    },
    "pairs/make_tiny": {
        "command_help",
        "interrupt",
        "pairs/evaluate_tiny",
        "pairs/save",
        "pairs/tiny_corpus",
        "reference",
        "train",
    },
}
# glue/ by lifetime: what each file or folder may import from glue/, function-level imports included
GLUE_ALLOWED: dict[str, set[str]] = {
    # the names of SGLang's symbols, and the list of changes to it
    "release": set(),
    "contract": set(),
    "symbols": {"contract", "symbols"},
    "compat": {"contract", "release", "symbols"},
    # what differs between releases
    "seams": {"compat", "release", "seams"},
    "changes": {"compat", "release", "seams"},
    "cpu": {"changes", "compat", "cpu", "seams"},
    # before anything is loaded
    "startup": {"changes", "compat", "release", "seams", "startup"},
    # for the lifetime of the server
    "models": {"changes", "compat", "cpu", "models", "seams"},
    # within a step
    "sampling": {"changes", "compat", "models", "sampling", "seams"},
    "after_step": {"after_step", "changes", "seams"},
    "step": {
        "after_step",
        "changes",
        "compat",
        "models",
        "release",
        "sampling",
        "seams",
        "startup",
        "step",
    },
    # SGLang's own programs, for the commands
    "programs": {"compat"},
    # attaches everything
    "plugin": {
        "after_step",
        "changes",
        "compat",
        "cpu",
        "models",
        "release",
        "sampling",
        "startup",
        "step",
    },
}
MAX_MODULE_LINES = 400
MAX_PROGRAM_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(parts: Sequence[str]) -> str:
    """Return the rule name of a path inside the package: its first two components if they have a
    rule of their own, else the first one."""
    return nested if (nested := "/".join(parts[:2])) in ALLOWED else parts[0]


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


def module_of(path: Path) -> str:
    parts = ["sglang_dflash", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


def modules_of(names: set[str]) -> set[str]:
    """Return the modules that importing these names runs; of packages only the one named."""
    return {
        name if name in MODULES else name.rpartition(".")[0]
        for name in names
        if name in MODULES or name.rpartition(".")[0] in MODULES
    }


def circles(imports: dict[str, set[str]]) -> set[str]:
    """Return the modules that are part of an import cycle."""
    reached = {name: set(found) for name, found in imports.items()}
    for middle in imports:
        for found in reached.values():
            if middle in found:
                found |= reached[middle]
    return {name for name, found in reached.items() if name in found}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_direction_of_the_design(path: Path) -> None:
    """A single import in the wrong direction makes the algorithm depend on its engine."""
    part = part_of(parts(path))
    own = (name for name in imports_of(path) if name.startswith("sglang_dflash."))
    used = {part_of(name.split(".")[1:]) for name in own}
    if part in ALLOWED:
        assert used <= ALLOWED[part], f"{part} imports {sorted(used - ALLOWED[part])}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sglang_is_named_in_its_tables_only(path: Path) -> None:
    named = {name for name in imports_of(path) if name.split(".")[0] == "sglang"}
    assert not named, "go through sglang_dflash.glue.compat"
    text = path.read_text()
    if PACKAGE / "glue" / "symbols" not in path.parents:
        for allowed in ("`sglang.srt.plugins`", 'group="sglang.srt.plugins"'):
            text = text.replace(allowed, "")
        assert '"srt.' not in text and "sglang.srt." not in text


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_are_loaded_by_name_in_glue_only(path: Path) -> None:
    """Code that loads modules by name can load SGLang's without a visible import."""
    loaders = ("import_module", "__import__", "runpy")
    is_loader = any(name in path.read_text() for name in loaders)
    assert not is_loader or PACKAGE / "glue" in path.parents


def reads_environment(source: str) -> bool:
    """Return whether a module uses one of Python's names for the environment."""
    names = {"environ", "environb", "getenv", "getenvb"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
        for node in ast.walk(ast.parse(source))
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    """A variable that is read elsewhere is neither typed, nor checked, nor listed."""
    # passes the whole environment on to a server
    is_harness = path == PACKAGE / "testing" / "server.py"
    is_reader = path == PACKAGE / "environment.py" or is_harness
    assert reads_environment(path.read_text()) == is_reader, "go through environment.py"


def test_a_seeded_read_of_the_environment_is_found() -> None:
    assert reads_environment("import os\nvalue = os.environ.get('A')")
    assert reads_environment("from os import getenv")
    assert not reads_environment("environment = {'A': '1'}")


def test_the_adapter_knows_no_command() -> None:
    for path in GLUE:
        assert not {name for name in imports_of(path) if name.startswith("sglang_dflash.commands")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            is_kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
            limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
            assert length <= limit, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_programs_and_tests_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_PROGRAM_LINES


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_are_imported_by_name(path: Path) -> None:
    """A folder on sys.path makes every file in it a top-level module, with a name like `load`."""
    # one puts stand-ins ahead of the installed libraries, one gives a server the path it was asked
    if path in (ROOT / "tests" / "conftest.py", ROOT / "tests" / "fork_server.py"):
        return
    nodes = ast.walk(ast.parse(path.read_text()))
    assert "sys.path" not in {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)}


def test_only_the_start_of_a_training_run_sees_its_arguments() -> None:
    """A Namespace that is passed further is untyped and gets mutated on the way."""
    train = sorted((PACKAGE / "train").glob("*.py"))
    users = {path.stem for path in train if "argparse" in imports_of(path)}
    assert users == {"arguments", "command", "prepare"}


def test_twins_stand_beside_their_kernels_and_need_no_triton() -> None:
    """A CPU runs the twins, and readers of a kernel look next to it for what it computes."""
    folders = {path.parent for path in SOURCES if part_of(parts(path)) in OP_FAMILIES}
    assert {f"kernels/{folder.name}" for folder in folders} == OP_FAMILIES
    for folder in folders:
        imports = {path.stem: imports_of(path) for path in folder.glob("*.py")}
        kernels = {name for name, found in imports.items() if "triton" in found}
        assert kernels and "reference" in imports and "reference" not in kernels


def test_the_table_names_only_parts_that_exist() -> None:
    assert set(ALLOWED) <= {part_of(parts(path)) for path in SOURCES}


def test_no_module_imports_itself_through_others() -> None:
    """No module of an import cycle can be read, tested or loaded without all the others."""
    imports = {name: modules_of(imports_of(path)) for name, path in MODULES.items()}
    assert circles(imports) == set()


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}


@pytest.mark.parametrize("path", GLUE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_glue_follows_its_lifetimes(path: Path) -> None:
    """If an attachment table imported the step, loading or reading it would involve all of it."""
    part = parts(path)[1]
    assert part in GLUE_ALLOWED, "add it to GLUE_ALLOWED"
    own = (name.split(".") for name in modules_of(imports_of(path)))
    used = {name[2] for name in own if name[:2] == ["sglang_dflash", "glue"] and len(name) > 2}
    assert used <= GLUE_ALLOWED[part], f"{part} imports {sorted(used - GLUE_ALLOWED[part])}"


def test_lifetimes_follow_each_other() -> None:
    """No two folders may depend on each other, whatever their files do."""
    assert circles({part: used - {part} for part, used in GLUE_ALLOWED.items()}) == set()
    assert set(GLUE_ALLOWED) == {parts(path)[1] for path in GLUE}


def calls_of(path: Path) -> list[tuple[str, int]]:
    """Return the methods that a module calls, with their argument counts."""
    return [
        (node.func.attr, len(node.args) + len(node.keywords))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]


def test_stage_3_alone_decides_which_drafts_are_kept() -> None:
    """A second caller is a second acceptance rule, which the oracle's tests do not cover."""
    callers: dict[str, set[str]] = {}
    for path in SOURCES:
        for name, given in calls_of(path):
            # with noise, its third argument, argmax_rows samples
            if name != "argmax_rows" or given > 2:
                callers.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
    for op in ("accept_block", "sample_rows", "reject_by_block", "argmax_rows"):
        assert callers[op] == {"accept.py"}, f"{op} is called in {sorted(callers[op])}"
