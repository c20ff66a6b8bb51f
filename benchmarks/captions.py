"""What a picture says below its panels: model, card, acceptance, release and commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def release(found: dict[str, Any]) -> str:
    return f"SGLang {found['sglang']}"


def option_of(command: str, name: str) -> str | None:
    """Return the value of an option in a recorded command."""
    found = re.search(rf"(?<!\S){name}[ =](\S+)", command)
    return found and found[1]


def model_of(found: dict[str, Any]) -> str:
    """Return the target of a result, and whether only its shapes were loaded."""
    asked = option_of(found["command"], "--model-path")
    path = Path(found.get("model") or found.get("pair", {}).get("target") or asked or "")
    # the tiny pair's
    name = "/".join(path.parts[-2:]) if path.name == "target" else path.name
    # without a pair, load.py measures shapes on a GPU
    is_default = "model" in found and found["gpu"] and not asked
    if is_default or option_of(found["command"], "--load-format") == "dummy":
        return f"{name} shapes with random weights"
    return name


def simulated_length(found: dict[str, Any]) -> str | None:
    """Return the accept length that a result was simulated at; None if it was not at just one."""
    return option_of(found["command"], "--simulate-accept-length")


def acceptance_of(found: dict[str, Any]) -> str:
    length = simulated_length(found)
    if length:
        return f"acceptance simulated at {length} tokens per step"
    points = [point for result in found["results"].values() for point in result.get("points", ())]
    if "texts" in found or any("task" in point for point in points):
        return "real text"
    if any("profile" in point for point in points):
        return "acceptance simulated at the accept length above each panel"
    return "random prompts, acceptance not simulated"


def caption_of(found: dict[str, Any]) -> str:
    """Return one line on what was measured, and on what."""
    card = f"one {found['gpu']}" if found["gpu"] else "a CPU"
    return (
        f"{model_of(found)} on {card}, {acceptance_of(found)}. "
        f"{release(found)}, commit {str(found['commit'])[:7]}."
    )
