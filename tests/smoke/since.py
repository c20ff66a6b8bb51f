"""Print which files of the serving path have changed since the last smoke test on a GPU.

GPU code is not done until it has run on a GPU; `make test` runs this and does not fail.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "smoke-h200.json"
SERVING_PATH = ["sglang_dflash", ":!*.md"]
# the other commands start servers
BESIDE = ("commands/report.py", "commands/train.py", "glue/programs/offline_engine.py")
BESIDE += ("pairs", "reference", "testing", "train")
SERVING_PATH += [f":!sglang_dflash/{part}" for part in BESIDE]


def changed_since(commit: str) -> list[str] | None:
    """Return the files that differ from a commit, uncommitted changes included; None if the
    history does not have it."""
    command = ["git", "diff", "--name-only", commit, "--", *SERVING_PATH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else None


def report() -> str:
    name = RESULT.relative_to(ROOT)
    if not RESULT.is_file():
        return f"smoke: {name} does not exist: run `make smoke` on a GPU."
    found = json.loads(RESULT.read_text())
    commit, verdict = found["commit"], "passed" if found["passed"] else "FAILED"
    at = f"smoke: {verdict} on {found['gpu']} at {commit}"
    files = changed_since(commit) if commit else None
    if files is None:
        return f"{at}, a commit that is not in this history."
    if not files:
        return f"{at}; the serving path is unchanged since."
    return "\n".join([f"{at}; changed in the serving path since:", *files])


if __name__ == "__main__":
    print(report())
