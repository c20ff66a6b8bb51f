"""Join the results of several calls of the smoke test, at one commit, into a result file.

    python -m tests.smoke.join first.json second.json

A family of a later call replaces the same family of an earlier one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from tests.smoke.families import FAMILIES
from tests.smoke.since import RESULTS, failed

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
    missing = {family.name for family in FAMILIES} - set(joined["families"])
    joined["passed"] = not failed(joined)
    joined["whole"] = not missing and bool(joined["recipe"])
    joined["seconds"] = round(sum(each["seconds"] for each in results), 1)
    return joined


def shorten(found: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in found.items() if key != "logs"}
    if "error" in kept:
        kept["error"] = kept["error"].splitlines()[0]
    return kept


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "smoke-h200.json")
    options = parser.parse_args()
    joined = join([json.loads(file.read_text()) for file in options.results])
    options.out.write_text(json.dumps(joined, indent=1) + "\n")
    print(f"{options.out}: {len(joined['families'])} families, failed: {failed(joined) or 'none'}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("join", main))
