"""Print which files of the serving path have changed since the last smoke test on a GPU.

GPU code is not done until it has run on a GPU; `make test` runs this and does not fail.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SERVING_PATH = ["sglang_dflash", ":!*.md"]
# what neither a server imports, nor the check of a pair with which a recipe starts it
# (tests/unit/test_smoke_since.py)
BESIDE = tuple(
    f"commands/{name}"
    for name in ("ask.py", "cards.py", "convert.py", "counts.py", "drafters.py", "history.py")
    + ("live.html", "report.py", "train.py", "tune.py", "tune_settings.py", "web.py")
)
# the stand-ins of launch/cpu.sh
BESIDE += ("glue/cpu/path", "glue/programs/offline_engine.py", "released_drafters.py")
BESIDE += ("pairs", "testing", "train")
SERVING_PATH += [f":!sglang_dflash/{part}" for part in BESIDE]


def changed_since(commit: str) -> list[str] | None:
    """Return the files that differ from a commit, uncommitted changes included; None if the
    history does not have it."""
    command = ["git", "diff", "--name-only", commit, "--", *SERVING_PATH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else None


def report() -> str:
    """Return a paragraph for each release of SGLang that the smoke test ran with."""
    # what a run that was cut off has left is no result
    files = [file for file in RESULTS.glob("smoke-*.json") if not file.stem.endswith(".part")]
    results = [json.loads(file.read_text()) for file in files]
    if not results:
        name = RESULTS.relative_to(ROOT)
        return f"smoke: {name} has no result: run `make smoke` on a GPU."
    return "\n".join(map(describe, sorted(results, key=lambda found: str(found["sglang"]))))


def is_fine(found: dict[str, Any]) -> bool:
    """Return whether nothing went wrong in a family or the recipe."""
    checks = [result for each in found.get("checks", {}).values() for result in each.values()]
    return "error" not in found and all(result == "ok" for result in checks)


def failed(result: dict[str, Any]) -> list[str]:
    """Return the names of the families and recipes that failed in a smoke test."""
    parts = {**result.get("families", {}), **result.get("recipe", {})}
    return [name for name, found in parts.items() if not is_fine(found)]


def describe(found: dict[str, Any]) -> str:
    """Return the verdict of a smoke test, and what has changed since."""
    commit, names = found["commit"], ", ".join(failed(found))
    verdict = "passed" if found["passed"] else f"FAILED ({names})"
    if not found["whole"]:
        ran = ", ".join({**found.get("families", {}), **found.get("recipe", {})})
        verdict += f" in part (only {ran})"
    ranks = f", {found['ranks']} ranks," if found.get("ranks", 1) > 1 else ""
    at = f"smoke: {verdict} on {found['gpu']} with SGLang {found['sglang']}{ranks} at {commit}"
    files = changed_since(commit) if commit else None
    if files is None:
        return f"{at}, a commit that is not in this history."
    if not files:
        return f"{at}; the serving path is unchanged since."
    return "\n".join([f"{at}; changed in the serving path since:", *files])


if __name__ == "__main__":
    print(report())
