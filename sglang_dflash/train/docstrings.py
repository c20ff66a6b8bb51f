"""Prompts that ask for code: Python functions to complete, from the docstrings of packages.

    python -m sglang_dflash.train.docstrings networkx.whl more_itertools.whl --out code.jsonl

A drafter for a coding model should be trained on code. Each function in a wheel or a source folder
yields one prompt: its signature and docstring, without its body. The packages' licences apply to
the prompts.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.train.output_file import check_writable

ASKS = "Write the body of this Python function:\n```python\n{}\n```"
# characters of a docstring: shorter ones say too little, longer ones are manuals
LENGTHS = range(60, 1200)


def sources(path: Path) -> Iterator[str]:
    """Yield the Python sources of a wheel or a folder, without tests."""
    if path.is_dir():
        found = ((str(f.relative_to(path)), f.read_bytes()) for f in sorted(path.rglob("*.py")))
    elif zipfile.is_zipfile(path):
        wheel = zipfile.ZipFile(path)
        found = (
            (name, wheel.read(name)) for name in sorted(wheel.namelist()) if name[-3:] == ".py"
        )
    else:
        raise SystemExit(f"{path} is neither a wheel nor a folder. Pass one of them.")
    for name, content in found:
        if not is_test(PurePath(name)):
            yield content.decode("utf-8", errors="replace")


def is_test(path: PurePath) -> bool:
    """Return whether a source is a test, or belongs to tests, by the names that pytest knows."""
    is_named_so = any(path.match(name) for name in ("test_*.py", "*_test.py", "conftest.py"))
    return is_named_so or not {"test", "tests"}.isdisjoint(path.with_suffix("").parts)


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name, and the signature with docstring, of each documented public function."""
    try:
        module = ast.parse(source)
    except SyntaxError:
        return
    # as Python counts them: str.splitlines also splits at form feeds and Unicode's separators
    lines = re.split(r"\r\n|\r|\n", source)
    for node in module.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node) or ""
        if len(doc) in LENGTHS:
            end = node.body[0].end_lineno
            yield node.name, "\n".join(lines[node.lineno - 1 : end])


def make_prompts(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield one prompt per function, without duplicates."""
    seen = set()
    for path in paths:
        package = path.name.split("-")[0]
        for source in sources(path):
            for name, text in functions(source):
                if text not in seen:
                    seen.add(text)
                    yield {"id": f"{package}/{name}", "prompt": ASKS.format(text)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("packages", nargs="+", type=Path, help="wheels, or folders of sources")
    parser.add_argument("--out", type=Path, required=True, help="JSONL for train --prompts")
    options = parser.parse_args()
    try:
        check_writable(options.out, option="--out")
    except ValueError as error:
        raise SystemExit(str(error)) from None
    lines = [json.dumps(row) for row in make_prompts(options.packages)]
    try:
        options.out.write_text("".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise SystemExit(
            f"--out {options.out} cannot be written ({error.strerror}). Pass another file."
        ) from None
    print(f"{len(lines)} prompts in {options.out}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("docstrings", main))
