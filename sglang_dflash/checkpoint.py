"""Check that a checkpoint given on the command line exists, is complete, or equals another."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sglang_dflash.safetensors_header import read_safetensors_header

# of each weight file, at its end: enough to tell two trainings apart
COMPARED_BYTES = 65536


def check_checkpoint(path: str, *, role: str) -> None:
    """Raise ValueError if a folder does not exist or has an incomplete or unreadable weight file.

    Reads only the file headers. A Hugging Face model name passes.
    """
    if _names_a_path(path) and not Path(path).exists():
        raise ValueError(
            f"The {role} {path} cannot be read: there is no such folder. Pass a folder with "
            "config.json and safetensors, or a model name you have access to."
        )
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            read_safetensors_header(file)
        except OSError as error:
            raise ValueError(
                f"The {role}'s file {file} cannot be read: {error.strerror}. Correct its "
                "permissions, or download it again."
            ) from error


def _names_a_path(path: str) -> bool:
    """Distinguish a path from `name`, `owner/name` and an object store URL."""
    return "://" not in path and (path.startswith(("/", ".", "~")) or path.count("/") > 1)


def fingerprint(folder: Path) -> str | None:
    """Return a checksum of the ends of a folder's weight files; None if it is no local folder."""
    if not folder.is_dir():
        return None
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            file.seek(max(0, size - COMPARED_BYTES))
            found.update(file.read())
    return found.hexdigest()[:16]
