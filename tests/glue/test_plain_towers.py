"""4-bit Gemma 4: SGLang takes part of its tower for quantised, unless a pattern says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.__main__ import main
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
