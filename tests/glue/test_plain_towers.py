"""4-bit Gemma 4: SGLang takes part of its tower for quantised, unless a pattern says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.__main__ import main
from sglang_dflash.commands import plain_towers
from sglang_dflash.commands.plain_towers import with_patterns

TOWER = "model.vision_tower.encoder.layers.0"
# as SGLang's Gemma 4 names the layers that it fuses
FUSED = [f"{TOWER}.self_attn.qkv_proj", f"{TOWER}.mlp.gate_up_proj"]
PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LISTED = [f"{TOWER}.self_attn.{part}.linear" for part in (*PARTS["qkv_proj"], "o_proj")]
LISTED += [f"{TOWER}.mlp.{part}.linear" for part in (*PARTS["gate_up_proj"], "down_proj")]


def published() -> dict[str, Any]:
    """A config like that of google/gemma-4-31B-it-qat-w4a16-ct."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    scheme = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", *LISTED, "model.embed_vision.embedding_projection"],
    }
    return {"model_type": "gemma4", "quantization_config": scheme}


def is_left_out(layer: str, config: dict[str, Any]) -> bool:
    from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer

    return should_ignore_layer(layer, config["quantization_config"]["ignore"], PARTS)


@pytest.mark.parametrize("layer", FUSED)
def test_sglang_takes_fused_layers_of_the_tower_for_quantised(layer: str) -> None:
    """When this fails, SGLang has mended it: drop `plain-towers`."""
    assert not is_left_out(layer, published())
    assert is_left_out(layer, with_patterns(published()))


@pytest.mark.parametrize("layer", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"])
def test_the_text_model_stays_quantised(layer: str) -> None:
    assert not is_left_out(f"model.language_model.layers.0.{layer}", with_patterns(published()))


def test_the_folder_has_the_files_and_the_changed_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = tmp_path / "a checkpoint", tmp_path / "made" / "folder"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(published()))
    (source / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):
        # the second time there is a folder
        assert main(["plain-towers", str(source), "--to", str(folder)]) == 0
        assert capsys.readouterr().out == f"{folder}\n"
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((folder / "config.json").read_text()) == with_patterns(published())
    assert json.loads((source / "config.json").read_text()) == published()


def test_patterns_are_added_once() -> None:
    once = with_patterns(published())
    assert with_patterns(once) == once
    ignored = once["quantization_config"]["ignore"]
    assert ignored[-2:] == ["re:.*vision_tower.*", "re:.*embed_vision.*"]


def test_what_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4"}))
    assert main(["plain-towers", str(tmp_path), "--to", str(tmp_path / "made")]) == 1
    assert "quantization method none, not compressed-tensors" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(published()))
    assert main(["plain-towers", str(tmp_path), "--to", str(tmp_path)]) == 1
    assert "is the checkpoint itself. Pass another folder with --to." in capsys.readouterr().err
    assert json.loads((tmp_path / "config.json").read_text()) == published()


def checkpoint(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published()))
    for name in names:
        (folder / name).write_text(f"{name} of {folder.name}")
    return folder


def made(source: Path, folder: Path) -> set[str]:
    assert main(["plain-towers", str(source), "--to", str(folder)]) == 0
    assert all(entry.exists() for entry in folder.iterdir()), "a link leads nowhere"
    return {entry.name for entry in folder.iterdir()}


def test_links_of_an_earlier_source_are_removed(tmp_path: Path) -> None:
    """A server would load the shards of both."""
    first = checkpoint(tmp_path / "first", "a.safetensors", "b.safetensors")
    second = checkpoint(tmp_path / "second", "c.safetensors")
    folder = tmp_path / "made"
    assert made(first, folder) == {"config.json", "a.safetensors", "b.safetensors"}
    # its links lead nowhere then
    (first / "b.safetensors").unlink()
    assert made(second, folder) == {"config.json", "c.safetensors"}
    # without any weights, as before they are downloaded
    bare = checkpoint(tmp_path / "bare")
    for _ in range(2):
        assert made(bare, folder) == {"config.json"}


@pytest.mark.parametrize("kind", ["a checkpoint", "a config", "a snapshot", "a file"])
def test_what_somebody_else_has_made_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source = checkpoint(tmp_path / "source", "model.safetensors")
    folder = tmp_path / "theirs"
    if kind == "a file":
        folder.write_text("a file")
    else:
        checkpoint(folder, *(["model.safetensors"] if kind == "a checkpoint" else []))
    if kind == "a snapshot":
        # as in the cache of Hugging Face, where the config is a link to a shared file as well
        (folder / "config.json").rename(tmp_path / "blob")
        (folder / "config.json").symlink_to(tmp_path / "blob")
    files = [folder] if kind == "a file" else sorted(folder.iterdir())
    before = [file.read_text() for file in files]
    assert main(["plain-towers", str(source), "--to", str(folder)]) == 1
    told = "is not a folder" if kind == "a file" else "has files that plain-towers has not made"
    assert f"{source}: {folder} {told}" in capsys.readouterr().err
    assert [file.read_text() for file in files] == before


def test_folders_of_the_same_name_do_not_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plain_towers, "CACHE", tmp_path / "cache")
    printed = []
    for owner in ("one", "other"):
        checkpoint(tmp_path / owner / "target", f"{owner}.safetensors")
        monkeypatch.chdir(tmp_path / owner)
        for path in ("target", "./target", str(tmp_path / owner / "target")):
            assert main(["plain-towers", path]) == 0
            printed.append(capsys.readouterr().out.strip())
    assert printed == [printed[0]] * 3 + [printed[3]] * 3 and printed[0] != printed[3]
    assert plain_towers.cache_name("google/gemma-4-31B-it") == "google--gemma-4-31B-it"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "has no config.json. Pass a checkpoint's folder, or a model name."),
        ("[]", "config.json holds [], not an object. Download it again."),
        ("null", "config.json holds null, not an object. Download it again."),
        ('{"quantization_config": "x"}', "has quantization method 'x', not compressed-tensors."),
        (
            '{"quantization_config": {"quant_method": "compressed-tensors", "ignore": 5}}',
            "quantization_config.ignore in its config.json is 5, not a list of names.",
        ),
    ],
)
def test_a_folder_without_a_usable_config_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["plain-towers", str(tmp_path), "--to", str(tmp_path / "made")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}: ") and told in line
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("target", ["./nothing", "/no/where/at/all", "not a name"])
def test_a_path_that_is_not_there_is_one_sentence(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert main(["plain-towers", target]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{target}: there is no such folder, and no model to download (")
    assert line.endswith("Pass a checkpoint's folder, or a model name you have access to.")
