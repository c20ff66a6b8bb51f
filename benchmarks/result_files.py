"""Result files: provenance of the numbers, tables and plots.

A result file records its command, commit, versions and GPU; plots need matplotlib.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import ROOT, bar_picture
from benchmarks.captions import caption_of, release
from benchmarks.gpu import gpu_name
from benchmarks.picture_style import name_of

# relative difference of two runs above which tables mark a point, and pictures count it
AGREEMENT = 0.05

Line = bar_picture.Line
Draw = Callable[[dict[str, Any], Path], None]


def add_result_options(
    parser: argparse.ArgumentParser, *, picture: bool, servers: bool = True
) -> None:
    """Add the options for result files, logs and the recorded commit."""
    parser.add_argument(
        "--commit", help="commit to record if the tree is a copy without git history"
    )
    files = "OUT.json, OUT.md and OUT.png" if picture else "OUT.json and OUT.md"
    parser.add_argument("--out", type=Path, help=f"writes {files}")
    if servers:
        parser.add_argument("--logs", type=Path, help="folder for each server's log and traces")
    if picture:
        parser.add_argument(
            "--picture", type=Path, help="only rewrite the table and the plot of this result file"
        )


def provenance(
    commit: str | None, *, hidden: Iterable[str] = (), named: Iterable[str] = ()
) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers: command, commit, GPU and versions."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "command": recorded_command(("--out", "--logs", *hidden), named),
        "commit": commit or git.stdout.strip() or None,
        "gpu": gpu_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang": version("sglang"),
    }


def recorded_command(hidden: Iterable[str] = ("--out", "--logs"), named: Iterable[str] = ()) -> str:
    """Return the command without the options that only say where files are, and their values. Of
    those that are `named`, the values keep the names of their files."""
    module = sys.modules["__main__"].__spec__
    kept = ["-m", module.name] if module else [short_path(sys.argv[0])]
    option = ""
    for word in sys.argv[1:]:
        if word.startswith("--"):
            option = word.partition("=")[0]
        if option in named and word != option:
            kept.append(Path(word).name)
        elif option not in hidden:
            kept.append(short_path(word))
    return " ".join(["python", *kept])


def short_path(word: str) -> str:
    """Shorten an absolute path to its name, or make it relative to the repository if inside it;
    return any other word unchanged."""
    if not word.startswith("/"):
        return word
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def result_file(out: Path, suffix: str) -> Path:
    """Return OUT with a suffix, instead of .json only: other dots, as in a version, are kept."""
    return out.with_name(out.name.removesuffix(".json") + suffix)


def read(path: Path, option: str, *keys: str) -> dict[str, Any]:
    """Return the JSON object in a file, gzipped or not; exit unless it has all `keys`. `option` is
    the one that names the file."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            found = json.load(file)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SystemExit(f"{option} {path}: {reason_of(error)}. Pass a JSON file.") from None
    if not isinstance(found, dict):
        raise SystemExit(f"{option} {path} is not a JSON object. --help says what is read.")
    if missing := [key for key in keys if key not in found]:
        raise SystemExit(f"{option} {path} has no {missing[0]!r}. --help says what is read.")
    return found


def read_lines(path: Path, option: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a file, one per line; exit if there is anything else."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{option} {path}: {reason_of(error)}. Pass a JSONL file.") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise SystemExit(
                f"{option} {path}: line {number} is {line[:60]!r}. Pass a file with a JSON object "
                "in each line."
            )
        found.append(row)
    return found


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def write(found: dict[str, Any], out: Path, text: str, draw: Draw | None = None) -> None:
    """Write OUT.json, OUT.md and, if matplotlib is installed, OUT.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    result_file(out, ".json").write_text(json.dumps(found, indent=1) + "\n")
    about = f"`{found['command']}`, {found['gpu'] or 'no GPU'}, {release(found)}, commit "
    about += f"{found['commit']}"
    result_file(out, ".md").write_text(f"{about}\n\n{text}\n")
    if draw is None:
        return
    try:
        draw(found, result_file(out, ".png"))
    except ImportError:
        path = result_file(out, ".json")
        print(f"no plot: matplotlib is not installed. Where it is, run with --picture {path}")


def rewrite(path: Path, table: Callable[[dict[str, Any]], str], draw: Draw) -> None:
    """Rewrite the table and the plot of the result file that --picture names."""
    found = read(path, "--picture", "command", "gpu", "commit", "results")
    write(found, path, table(found["results"]), draw)


def is_unsteady(point: dict[str, Any]) -> bool:
    """Return whether two runs of a point differ by more than AGREEMENT."""
    return (point.get("spread") or 0.0) > AGREEMENT


def remarks_on(found: dict[str, Any]) -> list[str]:
    """Return what makes some of a result's rates less comparable than the others."""
    remarks: list[str] = []
    for name, result in found["results"].items():
        remarks += batch_remarks(name_of(name), result.get("points", ()))
    points = [point for result in found["results"].values() for point in result.get("points", ())]
    unsteady = sum(map(is_unsteady, points))
    if unsteady:
        apart = f"differ by more than {AGREEMENT:.0%} between two runs"
        remarks.append(f"{unsteady} of the {len(points)} rates {apart}.")
    return remarks


def batch_remarks(name: str, points: Iterable[dict[str, Any]]) -> list[str]:
    """Say which of a system's batches did not run as one."""
    sizes = {(p["requests"], p.get("together", p["requests"])): None for p in points}
    parts = [f"{some} of {n}" for n, some in sizes if some and some != n]
    retracted = [str(n) for n, some in sizes if not some]
    found = [f"{name} ran only {', '.join(parts)} requests at once."] if parts else []
    if retracted:
        found.append(f"{name} ran {', '.join(retracted)} requests with retractions.")
    return found


def draw_rates(panels: Mapping[str, Mapping[str, Line]], found: dict[str, Any], path: Path) -> None:
    """Draw rates by requests, a panel per title: as speed-ups where plain decoding was measured."""
    if panels:
        caption = [caption_of(found), " ".join(remarks_on(found))]
        bar_picture.draw(bar_picture.panels_of(panels), path, caption)
