"""A checkpoint that is named on a command line: is it there, and are its weight files whole."""

from __future__ import annotations

from pathlib import Path

from sglang_dflash.safetensors_header import read_safetensors_header


def check_checkpoint(path: str, *, role: str) -> None:
    """Raise ValueError for a folder that is not there, or has a weight file that is not whole.

    Reads the headers of the files only. The name of a model on Hugging Face passes.
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
    """Tell a path from `name`, `owner/name` and the address of an object store."""
    return "://" not in path and (path.startswith(("/", ".", "~")) or path.count("/") > 1)
