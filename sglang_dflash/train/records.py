"""What a run writes down as JSON, read back with errors that name the file. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_record(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; an empty dict if there is no such file."""
    if not path.exists():
        return {}
    try:
        return _read_object(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} is not the JSON object that `train` wrote ({error}). Restore it from a copy, "
            "or pass another folder in its place."
        ) from None


def read_progress(path: Path) -> list[dict[str, Any]]:
    """Return the rows of progress.jsonl."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            rows.append(_read_object(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not a JSON object ({error}). Remove that line: it only "
                "records how the training went."
            ) from None
    return rows


def _read_object(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found
