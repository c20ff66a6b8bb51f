"""Read the header of a safetensors file and check the file's size against it.

An interrupted download leaves a file that looks complete until its tensors are read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8
# the format's own limit; a file that claims more is not a safetensors file
MAX_HEADER_BYTES = 100_000_000


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """Return each tensor's entry: dtype, shape and data_offsets. Tensors are not read.

    Raise ValueError naming the file unless it is a safetensors file of the size that its header
    describes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(LENGTH_BYTES)
        if len(prefix) < LENGTH_BYTES:
            raise _bad(path, f"it has {size} bytes, too few even for the length of its header")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise _bad(path, f"its header would be {length} bytes, more than the format allows")
        text = file.read(length)
    if len(text) < length:
        raise _bad(path, f"its header is {length} bytes and the file has {size}")
    tensors = _tensors_in(path, text)
    described = LENGTH_BYTES + length + max((_end_of(path, *t) for t in tensors.items()), default=0)
    if size != described:
        kind = "cut short" if size < described else "too long"
        raise _bad(path, f"it is {kind}: its header describes {described} bytes, it has {size}")
    return tensors


def _tensors_in(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise _bad(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _bad(path, f"its header is a JSON {type(header).__name__}, not an object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _end_of(path: Path, name: str, entry: Any) -> int:
    """Return the end offset of a tensor's data, relative to the end of the header."""
    match entry:
        case {"shape": [*_], "data_offsets": [int(begin), int(end)]} if 0 <= begin <= end:
            return end
    raise _bad(path, f"its header describes the tensor {name} only as {entry!r}")


def _bad(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is not a complete safetensors file: {reason}. Download it again (in a git clone: "
        "git lfs pull)."
    )
