"""An incomplete weight file is reported by name before anything loads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_dflash.safetensors_header import read_safetensors_header


def packed(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def test_a_whole_file_tells_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, path, metadata={"format": "pt"})
    found = read_safetensors_header(path)
    assert {name: tensor["shape"] for name, tensor in found.items()} == {"a": [2, 3], "b": [4]}


def test_a_file_without_tensors_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    save_file({}, path)
    assert read_safetensors_header(path) == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "it has 0 bytes", id="empty"),
        pytest.param(b"\0\0\0", "it has 3 bytes", id="cut in the length"),
        pytest.param(struct.pack("<Q", 2**62), f"header would be {2**62} bytes", id="huge header"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull", id="LFS pointer"
        ),
        pytest.param(
            struct.pack("<Q", 99_999_999) + b"{}",
            "its header is 99999999 bytes and the file has 10",
            id="cut in the header",
        ),
        pytest.param(struct.pack("<Q", 2) + b"{a", "its header is not JSON", id="garbled header"),
        pytest.param(struct.pack("<Q", 1) + b"\xff", "its header is not JSON", id="no text"),
        pytest.param(packed([1]), "a JSON list, not an object", id="list"),
        pytest.param(
            packed({"a": {"shape": [1]}}), "describes the tensor a only as", id="no offsets"
        ),
        pytest.param(packed({"a": entry(8, 4)}), "describes the tensor a only as", id="backwards"),
        pytest.param(
            packed({"a": entry(0, 8), "b": entry(8, 16)}, b"\0" * 15),
            "it is cut short: its header describes",
            id="cut in the data",
        ),
        pytest.param(packed({"a": entry(0, 8)}, b"\0" * 9), "it is too long", id="too long"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_by_name(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "model-00002-of-00004.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match="model-00002-of-00004.safetensors is not a complete"
    ) as refused:
        read_safetensors_header(path)
    assert reason in str(refused.value)
