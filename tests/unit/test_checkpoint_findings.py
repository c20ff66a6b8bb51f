"""What the doctor says of a checkpoint whose files or config are not what they should be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sglang_dflash.__main__ import main
from sglang_dflash.commands.memory_plan import (
    in_files,
    kv_bytes_per_token,
    kv_heads,
    on_one_rank,
    weight_files,
)
from sglang_dflash.pairs import tiny_drafter, tiny_target

PAIR = ["--model-path", str(tiny_target()), "--speculative-draft-model-path", str(tiny_drafter())]


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "holds [], not an object"),
        ("null", "holds null, not an object"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"layer_types": 5}, "cannot be r"),
    ],
)
def test_a_config_that_is_none_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, content: Any, reason: str
) -> None:
    folders = {"target": tiny_target(), "drafter": tiny_drafter()}
    shutil.copytree(folders[role], tmp_path / role)
    file = tmp_path / role / "config.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content)
    file.write_text(content)
    folders[role] = tmp_path / role
    pair = ["--model-path", str(folders["target"])]
    pair += ["--speculative-draft-model-path", str(folders["drafter"])]
    assert main(["doctor", *pair, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    [bad] = [found for found in findings if found["state"] == "bad"]
    assert bad["name"] == "pair" and reason in bad["advice"]


def test_a_layer_type_that_the_plan_does_not_count_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Llama 4. The pair is not refused for it: only its memory is not known."""
    config = SimpleNamespace(num_hidden_layers=2, layer_types=["chunked_attention"] * 2)
    told = "full_attention and sliding_attention layers, and not of those of type chunked_attention"
    with pytest.raises(ValueError, match=told):
        kv_heads(config)
    shutil.copytree(tiny_target(), tmp_path / "target")
    file = tmp_path / "target" / "config.json"
    config = json.loads(file.read_text())
    kinds = ["chunked_attention"] * config["num_hidden_layers"]
    file.write_text(json.dumps(config | {"layer_types": kinds}))
    pair = ["--model-path", str(tmp_path / "target"), *PAIR[2:]]
    for ranks in ("1", "2"):
        assert main(["doctor", *pair, "--tp-size", ranks]) == 0
        shown = capsys.readouterr().out
        assert f"note  memory: not checked: the memory plan counts KV of {told}\n" in shown
        assert "\nlaunch\n" in shown and "\nmemory plan\n" not in shown


@pytest.mark.parametrize("ranks", [1, 8])
def test_latents_of_mla_are_counted_and_every_rank_has_them(ranks: int) -> None:
    """DeepSeek V3 has 128 KV heads in its config, and 70 KB of KV per token."""
    config = SimpleNamespace(
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    assert kv_bytes_per_token(config, ranks) == {"full_attention": 61 * (512 + 64) * 2}
    sizes = {f"model.layers.0.self_attn.{name}.weight": 800 for name in ("q_a_proj", "q_b_proj")}
    assert on_one_rank(sizes, ranks, heads=128) == 800 + 800 // ranks


def sharded(folder: Path) -> Path:
    """Make the embedded target a checkpoint of two shards, which the folder also has in one."""
    shutil.copytree(tiny_target(), folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    of = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    return folder


def test_weights_beside_those_of_the_index_are_not_counted(tmp_path: Path) -> None:
    """Mistral publishes its weights twice in one folder; a server loads them once."""
    folder = sharded(tmp_path / "target")
    assert in_files(str(folder)) == in_files(str(tiny_target()))
    # other names than those of the shards
    shutil.copy(folder / "one.safetensors", folder / "three.safetensors")
    assert [file.name for file in weight_files(folder)] == ["one.safetensors", "two.safetensors"]


def test_a_shard_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sharded(tmp_path / "target")
    (folder / "two.safetensors").unlink()
    assert main(["doctor", "--model-path", str(folder), *PAIR[2:]]) == 1
    assert f"{folder} lacks two.safetensors, which its model" in capsys.readouterr().out
    # nothing is downloaded yet: the config tells the size
    (folder / "one.safetensors").unlink()
    assert in_files(str(folder)) is None
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="index.json is not an index of tensors"):
        weight_files(folder)
