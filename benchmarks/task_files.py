"""The tasks' question files, fetched row by row from the datasets' public viewer.

The viewer (https://huggingface.co/docs/dataset-viewer) serves any split as JSON, so that neither a
Parquet reader nor the datasets library is needed. Prompts are worded as in DFlash's own benchmark.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import requests

from sglang_dflash.testing.progress import Progress

FOLDER = Path.home() / ".cache" / "sglang_dflash" / "tasks"
VIEWER = "https://datasets-server.huggingface.co"
ROWS_PER_REQUEST = 100  # the most that the viewer returns
TIMEOUT_S = 30
IN_A_BOX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
WITH_TESTS = "Write a solution to the following problem and make sure that it passes the tests:"

Row = dict[str, Any]


class Source(NamedTuple):
    """Where a task's questions are, and what is asked for a row."""

    dataset: str
    subset: str
    split: str
    turns: Callable[[Row], list[str]]
    reference: str | None = None  # column


SOURCES = {
    "gsm8k": Source(
        "openai/gsm8k", "main", "test", lambda row: [row["question"] + IN_A_BOX], "answer"
    ),
    "math500": Source(
        "HuggingFaceH4/MATH-500",
        "default",
        "test",
        lambda row: [row["problem"] + IN_A_BOX],
        "solution",
    ),
    "humaneval": Source(
        "openai/openai_humaneval",
        "openai_humaneval",
        "test",
        lambda row: [f"{WITH_TESTS}\n```python\n{row['prompt']}\n```"],
        "canonical_solution",
    ),
    "mbpp": Source(
        "google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]], "code"
    ),
    "mtbench": Source(
        "HuggingFaceH4/mt_bench_prompts", "default", "train", lambda row: list(row["prompt"])
    ),
}


class Unavailable(Exception):
    """A task's questions cannot be fetched."""


def fetch(tasks: Iterable[str], folder: Path, *, viewer: str = VIEWER) -> dict[str, str]:
    """Write the files of those tasks that have none; return why, for those that have none still."""
    missing = [task for task in tasks if task in SOURCES and not file_of(task, folder).is_file()]
    failed: dict[str, str] = {}
    if not missing:
        return failed
    with Progress(len(missing), "files", what="fetching questions") as progress:
        for task in missing:
            progress.name(task)
            try:
                lines = [json.dumps(question) for question in questions(task, viewer)]
            except Unavailable as error:
                failed[task] = str(error)
            else:
                write(file_of(task, folder), "\n".join(lines) + "\n")
            progress.step()
    return failed


def file_of(task: str, folder: Path) -> Path:
    return folder / f"{task}.jsonl"


def write(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def questions(task: str, viewer: str) -> Iterator[Row]:
    """Yield a task's questions as `benchmarks.tasks` reads them."""
    source = SOURCES[task]
    for number, row in enumerate(rows(source, viewer)):
        try:
            question = {"id": f"{task}/{number}", "turns": source.turns(row)}
            if source.reference is not None:
                question["reference"] = row[source.reference]
        except KeyError as error:
            raise Unavailable(f"{source.dataset} has no column {error}: {sorted(row)}") from None
        yield question


def rows(source: Source, viewer: str) -> Iterator[Row]:
    """Yield the rows of a split."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise Unavailable("HF_HUB_OFFLINE is set")
    split = {"dataset": source.dataset, "config": source.subset, "split": source.split}
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    seen, total = 0, 1
    while seen < total:
        asked = {**split, "offset": str(seen), "length": str(ROWS_PER_REQUEST)}
        try:
            answer = requests.get(
                f"{viewer}/rows", params=asked, headers=headers, timeout=TIMEOUT_S
            )
            answer.raise_for_status()
            found = answer.json()
            page, total = [each["row"] for each in found["rows"]], found["num_rows_total"]
        except (requests.RequestException, KeyError) as error:
            raise Unavailable(f"{viewer}/rows for {source.dataset}: {_short(error)}") from None
        if not page:
            raise Unavailable(f"{source.dataset} ends after {seen} of {total} rows")
        yield from page
        seen += len(page)


def _short(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the answer has no {error}"
    response = getattr(error, "response", None)
    return f"HTTP {response.status_code}" if response is not None else type(error).__name__
