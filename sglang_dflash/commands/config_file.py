"""Read the config.json of a local checkpoint, which may be missing or hold anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

NAME = "config.json"
# what transformers raises for a config that it cannot read: the last three for values of a kind
# that its class does not expect
UNREADABLE = (OSError, ValueError, StrictDataclassError, TypeError, AttributeError)


def read_config_file(folder: Path, *, wanted: str) -> dict[str, Any]:
    """Return the config. Raise ValueError for a file that is none; `wanted`: what to pass."""
    path = folder / NAME
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} has no {NAME}. Pass {wanted}.") from None
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}. Correct its permissions, or pass {wanted}."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Download it again.") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds {json.dumps(found)[:60]}, not an object. Download it again."
        )
    return found
