"""What the release file of the pairs refuses to write over."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.pairs import BESIDE_THE_PACKAGE, release_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("kept")
    return tmp_path / "file"


@pytest.mark.parametrize(
    "words", [["pack"], ["unpack", "some.tar.gz", "--out"]], ids=lambda w: w[0]
)
def test_a_file_in_the_place_of_the_folder_is_one_line(
    words: list[str],
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["release_file", *words, str(file)])
    assert release_file.main() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"release_file: {file} cannot be made: File exists. Name a folder")
    assert file.read_text() == "kept"


def test_a_users_folder_of_the_same_name_is_kept(tmp_path: Path) -> None:
    """`unpack FILE --out ~/models` would otherwise delete what is in ~/models/tiny."""
    archive = release_file.pack(BESIDE_THE_PACKAGE, tmp_path / "dist")
    out = tmp_path / "models"
    release_file.unpack(archive, out)
    # earlier pairs are replaced
    (out / "tiny" / "target" / "config.json").write_text("{}")
    release_file.unpack(archive, out)
    assert (out / "tiny" / "target" / "config.json").stat().st_size > 2
    (out / "tiny" / "mine").write_text("kept")
    with pytest.raises(ValueError, match="has tiny/mine, which is not of the pairs"):
        release_file.unpack(archive, out)
    assert (out / "tiny" / "mine").read_text() == "kept"
