"""A learned embedding of the mask token: read, or refused with what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_dflash import mask_embedding
from sglang_dflash.__main__ import main
from sglang_dflash.reference import Drafter
from sglang_dflash.train.drafter_setup import read_drafter_config
from tests.oracle_drafter import make_drafter
from tests.tiny_configs import hf_config

GOOD = {"mask_token_id": 3, "embedding": torch.arange(32.0)}


def read(folder: Path) -> Tensor | None:
    return mask_embedding.read(folder, name="some/drafter", mask_token_id=3, hidden_size=32)


def write(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "mask_embedding.pt")
    return folder


def test_it_is_read_if_there_is_one(tmp_path: Path) -> None:
    assert read(tmp_path) is None and read(tmp_path / "nowhere") is None
    found = read(write(tmp_path, GOOD))
    assert found is not None and torch.equal(found, GOOD["embedding"])


def test_it_is_found_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    caplog.set_level("INFO")
    assert mask_embedding.find(str(tmp_path)) == tmp_path and not caplog.messages
    assert read(mask_embedding.find("some/drafter")) is None
    [line] = caplog.messages
    assert "does not tell whether the drafter some/drafter has a mask_embedding.pt" in line
    commit = "0" * 40
    folder = tmp_path / "models--some--drafter"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    write(folder / "snapshots" / commit, GOOD)
    assert read(mask_embedding.find("some/drafter")) is not None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (torch.zeros(32), "has no dict"),
        ({"embedding": torch.zeros(32)}, r"has the keys \['embedding'\]"),
        ({**GOOD, "mask_token_id": 4}, "is for token 4, but its config.json names .* 3"),
        ({**GOOD, "embedding": torch.zeros(31)}, r"of shape \[31\], but .* of 32 numbers"),
        ({**GOOD, "embedding": [0.0] * 32}, r"of shape \[\]"),
        ({**GOOD, "embedding": torch.zeros(8, 32), "per_position": True}, "by position"),
    ],
)
def test_anything_else_is_told(tmp_path: Path, content: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"drafter some/drafter .*{told}"):
        read(write(tmp_path, content))


def test_a_broken_file_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD) / "mask_embedding.pt"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path)


def test_the_oracle_embeds_masks_with_it(tmp_path: Path) -> None:
    make_drafter().save_pretrained(tmp_path)
    drafter = Drafter.from_pretrained(write(tmp_path, GOOD))
    target = nn.Embedding(64, 32)
    found = drafter.embed(target, torch.tensor([[7, 3, 3]]))
    assert torch.equal(found[0, 0], target.weight[7])
    assert torch.equal(found[0, 1:], GOOD["embedding"].expand(2, -1))


def test_what_would_lose_it_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_drafter().save_pretrained(tmp_path)
    write(tmp_path, GOOD)
    with pytest.raises(ValueError, match="has a learned mask_embedding.pt"):
        read_drafter_config(tmp_path, hf_config("llama"))
    assert main(["convert", str(tmp_path), str(tmp_path / "other"), "--model-path", "x"]) == 1
    assert "has a learned mask_embedding.pt" in capsys.readouterr().out
