"""`python -m sglang_dflash drafters`: which released drafters are served, as docs/drafters.md."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sglang_dflash.config import DrafterSpec
from sglang_dflash.glue import compat
from sglang_dflash.glue.startup.recurrent_targets import refuse_unknown_states
from sglang_dflash.released_drafters import RELEASED, Released, Target

HEAD = """# Released drafters

Written by `python -m sglang_dflash drafters`. The verdicts come from the checks that a
server runs, applied to the class of the drafter's target and to what its `config.json` has
beyond that of a plain drafter (`sglang_dflash/released_drafters.py`). A drafter is "served" if a
test, which the last column names, runs a tiny pair of its kind and compares the drafts with the
oracle's. It is "accepted" if nothing of its kind was run. The tests do not run released weights.

| drafter | verdict | why | tested |
|---|---|---|---|
"""


def run_drafters() -> int:
    """Print the table."""
    print(table(), end="")
    return 0


def table() -> str:
    """Return docs/drafters.md."""
    return HEAD + "".join(f"| {' | '.join(row(each))} |\n" for each in RELEASED)


def row(released: Released) -> tuple[str, str, str, str]:
    """Return the cells of one kind of drafter."""
    reason = why_refused(released)
    if reason is not None:
        return released.names, "refused", reason, "the refusal: tests/glue/test_drafters_table.py"
    if released.unseen:
        return released.names, "not known", f"config.json not seen: {released.unseen}", "not run"
    found = "speculators format" if released.is_speculators else "released format"
    verdict = "served" if released.tested else "accepted"
    return released.names, verdict, found, released.tested or "not run"


def why_refused(released: Released) -> str | None:
    """Return why a server would refuse a drafter, or its target; None if it would not."""
    try:
        DrafterSpec.from_config(released.config_json(), name="itself")
        if released.target is not None:
            refuse_unknown_states(_config_of(released.target), name=released.target.model_type)
    except ValueError as error:
        # without what to do about it
        return str(error).split(". ")[0].replace("|", "\\|")
    return None


def _config_of(target: Target) -> object:
    """Return a target's config as SGLang reads it."""
    config: dict[str, object] = {
        "model_type": target.model_type,
        "architectures": [target.architecture],
    }
    if target.text_type is not None:
        config["text_config"] = {"model_type": target.text_type}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return compat.get_config(folder, trust_remote_code=False)
