"""Prompts from docstrings: what they ask, and what is left out."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from sglang_dflash.train.docstrings import main, make_prompts

SOURCE = '''
def pairs(items,
          step=1):
    """Return every item together with the one that stands `step` places after it.

    >>> pairs([1, 2, 3])
    [(1, 2), (2, 3)]
    """
    return list(zip(items, items[step:]))


def short():
    """Say nothing."""


def _private():
    """Explain at length what nobody outside of this module is supposed to call or to know."""


class Thing:
    def method(self):
        """Explain at length what cannot be written without the class that it belongs to."""
'''
ASKED = (
    "Write the body of this Python function:\n```python\ndef pairs(items,\n          step=1):\n"
    '    """Return every item together with the one that stands `step` places after it.\n\n'
    '    >>> pairs([1, 2, 3])\n    [(1, 2), (2, 3)]\n    """\n```'
)


def write_sources(folder: Path) -> Path:
    files = {
        "a.py": SOURCE,
        "copy.py": SOURCE,
        "broken.py": "def broken(:",
        "tests/test_a.py": SOURCE.replace("pairs", "tested"),
        "notes.txt": SOURCE.replace("pairs", "noted"),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_public_function_that_explains_itself_is_asked_for_once(tmp_path: Path) -> None:
    folder = write_sources(tmp_path / "some-1.0")
    assert list(make_prompts([folder])) == [{"id": "some/pairs", "prompt": ASKED}]


def test_a_wheel_gives_what_its_sources_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_sources(tmp_path / "some-1.0")
    wheel, out = tmp_path / "some-1.0-py3-none-any.whl", tmp_path / "code.jsonl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.*"):
            archive.write(path, path.relative_to(folder))
    monkeypatch.setattr("sys.argv", ["docstrings", str(wheel), str(folder), "--out", str(out)])
    main()
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == [ASKED]


def test_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(SOURCE)
    with pytest.raises(SystemExit, match=r"code\.py is neither a wheel nor a folder"):
        list(make_prompts([path]))
