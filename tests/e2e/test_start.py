"""Errors that only show while weights load still end the server with a one-sentence message."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_dflash.pairs import tiny_drafter
from sglang_dflash.testing.server import Server


def test_drafter_with_missing_weights_ends_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(tiny_drafter(), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["norm.weight"]
    tensors["lm_head.weight"] = tensors["fc.weight"].clone()
    save_file(tensors, path)
    server = Server("--speculative-draft-model-path", str(folder))
    with pytest.raises(RuntimeError, match="the server exited during start-up"):
        server.wait()
    assert (
        "are not those of a DFlash drafter: missing ['norm.weight'], unknown ['lm_head.weight']"
        in server.log()
    )
