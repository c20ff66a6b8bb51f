"""Join the results of several calls of the smoke test, at one commit, into a result file.

    python -m tests.smoke.join first.json second.json

A family of a later call replaces the same family of an earlier one. The result is named as that of
a single call (tests/smoke/run.py); while something is missing, it needs --out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import result_files
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from tests.smoke.run import names_of, result_file
from tests.smoke.since import failed

# what one result is about
SAME = ("commit", "gpu", "torch", "triton", "sglang", "ranks")


def join(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of all calls together, without logs and tracebacks."""
    first = results[0]
    for each in results[1:]:
        if differing := [name for name in SAME if each.get(name) != first.get(name)]:
            raise SystemExit(
                f"These are not calls of one smoke test: {', '.join(differing)} differ."
            )
    joined: dict[str, Any] = {name: first.get(name) for name in SAME}
    joined["calls"] = [{name: each[name] for name in ("command", "seconds")} for each in results]
    for part in ("families", "recipe"):
        joined[part] = {}
        for each in results:
            joined[part] |= {name: shorten(found) for name, found in each.get(part, {}).items()}
    joined["passed"] = not failed(joined)
    joined["whole"] = not missing_from(joined)
    joined["seconds"] = round(sum(each["seconds"] for each in results), 1)
    return joined


def shorten(found: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in found.items() if key != "logs"}
    if "error" in kept:
        kept["error"] = kept["error"].splitlines()[0]
    return kept


def missing_from(joined: dict[str, Any]) -> list[str]:
    """Return what a whole smoke test on so many ranks, with that release of SGLang, has besides."""
    ranks = joined["ranks"] or 1
    names = names_of(ranks, joined["sglang"])
    missing = [name for name in names if name not in joined["families"]]
    return missing + (["the 31B recipe"] if ranks == 1 and not joined["recipe"] else [])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="results of the calls, in order")
    parser.add_argument("--out", type=Path, help="default: in benchmarks/results")
    options = parser.parse_args()
    keys = ("command", "seconds", "commit", "gpu", "sglang", "families")
    joined = join([result_files.read(file, "results", *keys) for file in options.results])
    if missing := ", ".join(missing_from(joined)):
        print(f"missing: {missing}")
        if options.out is None:
            parser.error(f"without {missing} it is not a whole smoke test: name a file by --out")
    out = options.out or result_file(joined)
    out.write_text(json.dumps(joined, indent=1) + "\n")
    print(f"{out}: {len(joined['families'])} families, failed: {failed(joined) or 'none'}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("join", main))
