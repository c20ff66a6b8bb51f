"""What the doctor reports about this installation, and about pairs that fit or do not."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.__main__ import main
from sglang_dflash.glue import compat, release, seams
from sglang_dflash.glue.contract import Symbol
from sglang_dflash.kernels import cards
from sglang_dflash.kernels.cards import Card
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.testing.server import ROOT
from tests.tiny_models import (
    make_drafter,
    make_speculators_drafter,
    make_target,
    write_hybrid_config,
)

PAIR = ["--model-path", str(tiny_target()), "--speculative-draft-model-path", str(tiny_drafter())]


def test_doctor_finds_a_good_pair_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *PAIR, "--gpu-memory-gb", "80", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {f["state"] for f in told["findings"]} <= {"ok", "note"}
    # 8 layers of 2 KV heads of 64, keys and values, two bytes each; the drafter has 2 such layers
    assert told["plan"]["memory"]["target KV per token, full_attention"] == "4096 bytes"
    assert told["plan"]["memory"]["draft KV per token"] == "1024 bytes"
    assert "--speculative-draft-model-path" in told["plan"]["launch"]


def test_doctor_reads_a_drafter_in_the_speculators_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target("qwen3", tmp_path / "target")
    drafter = make_speculators_drafter(tmp_path / "drafter", tokens=300)
    pair = ["--model-path", str(target), "--speculative-draft-model-path", str(drafter)]
    assert main(["doctor", *pair, "--gpu-memory-gb", "80", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("features from layers [1, 3, 4]" in f["found"] for f in told["findings"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (PAIR[:2], "Pass --speculative-draft-model-path as well"),
        ([*PAIR[:3], "/nowhere"], "/nowhere cannot be read"),
        ([*PAIR, "--gpu-memory-gb", "0.001"], "Use a larger card"),
    ],
)
def test_doctor_blocks_what_would_not_start(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 1
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "tune"])
def test_a_command_that_needs_a_pair_asks_for_both(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asked for one of them "as well"."""
    assert main([command]) == 1
    told = capsys.readouterr().err
    assert "no target and no drafter. Pass --model-path and --speculative-draft-model-path." in told


def test_doctor_names_a_weight_file_that_is_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_target(), tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert main(["doctor", "--model-path", str(tmp_path / "target"), *PAIR[2:]]) == 1
    assert f"{file} is not a complete safetensors file: it is cut short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capability", "backend"), [((9, 0), "fa4"), ((12, 0), "triton")], ids=["H200", "RTX 5090"]
)
def test_doctor_looks_for_the_backend_that_the_card_drafts_with(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    capability: tuple[int, int],
    backend: str,
) -> None:
    monkeypatch.setattr(cards, "current", lambda: Card(capability))
    main(["doctor", "--json"])
    told = [f["name"] for f in json.loads(capsys.readouterr().out)["findings"]]
    assert [name for name in told if "draft" in name] == [f"draft attention {backend}"]


def test_the_command_fits_the_card_that_was_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a folder"
    shutil.copytree(tiny_target(), target)
    pair = ["--model-path", str(target), *PAIR[2:]]

    def launch(*asked: str) -> list[str]:
        assert main(["doctor", *pair, *asked, "--json"]) == 0
        return shlex.split(json.loads(capsys.readouterr().out)["plan"]["launch"])

    command = launch("--gpu-memory-gb", "24", "--tp-size", "2")
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", str(target)]
    assert command[command.index("--tp-size") + 1] == "2"
    # the server chooses it by the card
    assert "--speculative-draft-attention-backend" not in command
    assert "--trust-remote-code" not in command
    assert "--trust-remote-code" in launch("--gpu-memory-gb", "24", "--trust-remote-code")
    if not torch.cuda.is_available():
        assert launch() == ["launch/cpu.sh", *pair]


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="about an environment for a CPU")
def test_doctor_is_content_with_the_environment_of_make() -> None:
    """Its stand-ins are on the path, and nothing else selects the CPU."""
    stand_ins = ROOT / "sglang_dflash" / "glue" / "cpu" / "path"
    env = {**os.environ, "PYTHONPATH": f"{stand_ins}:{ROOT}"}
    env.pop("SGLANG_USE_CPU_ENGINE", None)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dflash", "doctor", *PAIR],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    assert "symbols of SGLang are as expected" in done.stdout


def test_doctor_blocks_a_switch_that_would_end_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH", "0")
    assert main(["doctor"]) == 1
    assert "SGLANG_DFLASH=0 is neither on nor off. Set one of the two." in capsys.readouterr().out


def test_serve_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "--speculative-draft-model-path" in told and "sglang.launch_server --help" in told


@pytest.mark.parametrize("command", ["doctor", "serve"])
def test_a_python_without_torch_is_told_in_one_sentence(command: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "sglang_dflash", command, *PAIR],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == f"{sys.executable} has no torch. Use a Python that has SGLang.\n"


def test_doctor_blocks_a_drafter_of_another_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((tiny_drafter() / "config.json").read_text())
    config |= {"architectures": ["DFlashLagunaForCausalLM"], "gating": "per-head"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["doctor", *PAIR[:3], str(tmp_path)]) == 1
    named = "architectures ['DFlashLagunaForCausalLM'], gating 'per-head'"
    assert f"does not support: {named}" in capsys.readouterr().out


def test_doctor_blocks_a_target_with_other_recurrent_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_hybrid_config(tmp_path / "hybrid", "lfm2")
    assert main(["doctor", "--model-path", str(target), *PAIR[2:]]) == 1
    assert "has linear-attention or Mamba layers" in capsys.readouterr().out


@pytest.mark.skipif(not seams.chooses_snapshots, reason="refused with this release of SGLang")
def test_doctor_counts_the_states_of_linear_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four layers of six, with states of 4 heads by 24 by 16 values of 4 bytes, and 3 inputs of
    convolutions over 160 channels of 2 bytes; the other two layers have KV."""
    target = make_target("qwen3-next", tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter")
    pair = ["--model-path", str(target), "--speculative-draft-model-path", str(drafter)]
    assert main(["doctor", *pair, "--gpu-memory-gb", "80", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["plan"]["memory"]
    state = 4 * (4 * 24 * 16 * 4 + 3 * 160 * 2) / 2**20
    assert memory["states of linear attention per request"] == (
        f"{state:.1f} MiB, and {16 * state:.1f} for its verify passes"
    )
    assert memory["target KV per token, full_attention"] == f"{2 * 2 * 2 * 32 * 2} bytes"


def test_kv_of_gemma_4_is_counted_by_kind_of_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """31B: 50 sliding layers with 16 KV heads of 256, 10 full layers with 4 KV heads of 512."""
    shapes = ROOT / "benchmarks" / "shapes"
    pair = ["--model-path", str(shapes / "gemma4-31b")]
    pair += ["--speculative-draft-model-path", str(shapes / "gemma4-31b-draft")]
    assert main(["doctor", *pair, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["plan"]["memory"]
    assert memory["target KV per token, sliding_attention"] == f"{50 * 2 * 16 * 256 * 2} bytes"
    assert memory["target KV per token, full_attention"] == f"{10 * 2 * 4 * 512 * 2} bytes"


def test_weights_that_are_not_here_are_counted_from_the_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Qwen3-8B: 8.19 billion parameters of two bytes; 36 layers with 8 KV heads of 128."""
    shapes = ROOT / "benchmarks" / "shapes"
    pair = ["--model-path", str(shapes / "qwen3-8b")]
    pair += ["--speculative-draft-model-path", str(shapes / "qwen3-8b-draft")]
    assert main(["doctor", *pair, "--gpu-memory-gb", "80", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["plan"]["memory"]
    assert memory["target weights"] == "15.26 GiB"
    weights = sum(float(memory[f"{name} weights"].split()[0]) for name in ("target", "draft"))
    per_token = 36 * 2 * 8 * 128 * 2 + int(memory["draft KV per token"].split()[0])
    expected = (0.85 * 80 - weights) * 2**30 / per_token
    assert memory["tokens that fit"] == pytest.approx(expected, rel=0.001)
    assert main(["doctor", *pair, "--gpu-memory-gb", "16"]) == 1
    assert "GiB of weights leave no room for KV in 0.85 of 16 GiB" in capsys.readouterr().out
    assert main(["doctor", *pair, "--gpu-memory-gb", "16", "--tp-size", "2"]) == 0
    assert "GiB of 2 x 16 GiB" in capsys.readouterr().out
    # the quantised size is unknown until the model is loaded
    assert main(["doctor", *pair, "--gpu-memory-gb", "16", "--quantization", "fp8"]) == 0
    assert "not checked" in capsys.readouterr().out


def shapes(name: str) -> list[str]:
    """Return the arguments that name a recipe's pair by its shapes."""
    folder = ROOT / "benchmarks" / "shapes"
    pair = ["--model-path", str(folder / name)]
    return [*pair, "--speculative-draft-model-path", str(folder / f"{name}-draft")]


def plan(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> dict[str, Any]:
    assert main(["doctor", *shapes(name), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["plan"]["memory"]


def test_a_rank_holds_its_shard_and_all_that_is_not_divided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Qwen3-8B: norms are 0.0006 GiB, and the drafter's projection of five features is 5 * 4096 *
    4096 values, 0.16 GiB, which every rank holds."""
    whole = plan(capsys, "qwen3-8b")
    two = plan(capsys, "qwen3-8b", "--tp-size", "2")
    weights = {role: gib(whole[f"{role} weights"]) for role in ("target", "draft")}
    halves = {role: gib(two[f"{role} weights on each of 2 ranks"]) for role in weights}
    assert halves["target"] == pytest.approx(weights["target"] / 2, abs=0.01)
    projection = 5 * 4096 * 4096 * 2 / 2**30
    assert halves["draft"] == pytest.approx((weights["draft"] + projection) / 2, abs=0.01)
    assert two["draft KV per token on each of 2 ranks"] == f"{5 * 2 * 4 * 128 * 2} bytes"
    kv = "target KV per token on each of {} ranks, full_attention"
    assert two[kv.format(2)] == f"{36 * 2 * 4 * 128 * 2} bytes"
    # of 8 KV heads each of 16 ranks holds one, and the weights that make it
    sixteen = plan(capsys, "qwen3-8b", "--tp-size", "16")
    assert sixteen[kv.format(16)] == f"{36 * 2 * 1 * 128 * 2} bytes"
    twice = 2 * 36 * 4096 * 1024 * 2 / 2**30 / 16
    assert gib(sixteen["target weights on each of 16 ranks"]) == pytest.approx(
        weights["target"] / 16 + twice, abs=0.01
    )


def gib(text: str) -> float:
    return float(text.removesuffix(" GiB"))


@pytest.mark.parametrize(
    ("name", "ranks", "fits"),
    [
        ("qwen3-8b", "1", [24, 32, 48, 80, 141, 180]),
        ("gpt-oss-20b", "1", [24, 32, 48, 80, 141, 180]),
        ("qwen3-coder-30b-a3b", "1", [80, 141, 180]),
        ("qwen3-coder-30b-a3b", "2", [48, 80, 141, 180]),
        ("qwen3-coder-30b-a3b", "4", [24, 32, 48, 80, 141, 180]),
    ],
)
def test_the_plan_says_which_cards_fit(
    capsys: pytest.CaptureFixture[str], name: str, ranks: str, fits: list[int]
) -> None:
    """Qwen3-Coder: 57.8 GiB of weights; on two cards of 32 GB they leave nothing of 0.85."""
    line = plan(capsys, name, "--tp-size", ranks)["tokens that fit by card"]
    cards = {int(card): tokens for card, tokens in re.findall(r"(\d+) GB: ([^,]+)", line)}
    assert [card for card, tokens in cards.items() if tokens != "too small"] == fits
    if ranks != "1":
        return
    # the same number as for a card of that size
    one = plan(capsys, name, "--gpu-memory-gb", "139.8")
    assert int(cards[141]) == one["tokens that fit"]


def test_experts_in_mxfp4_are_counted_so(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt-oss-20b: the published files have 12.8 GiB, and would have 38.9 in bf16."""
    experts = 24 * 32 * 3 * 2880 * 2880 * (4 + 8 / 32) / 8 / 2**30
    tables = 2 * 201088 * 2880 * 2 / 2**30
    attention = 24 * 2880 * (2 * 64 + 2 * 8) * 64 * 2 / 2**30
    # and biases, norms and routers
    assert gib(plan(capsys, "gpt-oss-20b")["target weights"]) == pytest.approx(
        experts + tables + attention, abs=0.03
    )


def test_ranks_that_do_not_divide_the_heads_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server would find out after it has loaded the target."""
    assert main(["doctor", *shapes("qwen3-8b"), "--tp-size", "3"]) == 1
    told = capsys.readouterr().out
    assert "tensor parallelism: the target has 32 query heads and 8 KV heads\n" in told
    assert "--tp-size 3 does not divide them. Pass a size that does." in told


def test_a_drafter_that_ranks_cannot_share_is_counted_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the server holds it."""
    target, folder = shapes("qwen3-8b")[1], Path(shapes("qwen3-8b")[3])
    config = json.loads((folder / "config.json").read_text()) | {
        "num_attention_heads": 33,
        "num_key_value_heads": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = ["--model-path", target, "--speculative-draft-model-path", str(tmp_path)]

    def told(*arguments: str) -> tuple[dict[str, str], dict[str, Any]]:
        assert main(["doctor", *pair, *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        states = {each["name"]: f"{each['state']} {each['found']}" for each in found["findings"]}
        return states, found["plan"]["memory"]

    whole, (states, two) = told()[1], told("--tp-size", "2")
    ranks = " on each of 2 ranks"
    assert two[f"draft weights{ranks}"] == whole["draft weights"]
    assert two[f"draft KV per token{ranks}"] == whole["draft KV per token"]
    assert states["tensor parallelism"] == (
        "note 2 ranks share the target's heads equally, and each holds the whole drafter, which "
        "has 33 query heads, 3 KV heads, and an MLP of 12288"
    )


def test_the_contract_is_printed_with_what_moved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a release that is not served, this is the list of what a port has to change."""
    assert main(["doctor", "--contract"]) == 0
    told = capsys.readouterr().out
    installed = release.installed()
    last = f"SGLang {installed} has moved 0 of {len(compat.SYMBOLS)} symbols of {installed}.\n"
    assert told.endswith(last)
    assert "bad " not in told
    line = "ok    logit_capping_mod: sglang.srt.layers.attention.triton_backend.logit_capping_mod "
    assert line + "(first parameters logit_capping_method, logit_cap)\n" in told
    monkeypatch.setattr(release, "installed", lambda: "0.5.99")
    gone = Symbol("srt.layers.linear", "TritonLinear")
    monkeypatch.setattr(compat, "SYMBOLS", {"kept": Symbol("srt.layers.linear", ""), "gone": gone})
    assert main(["doctor", "--contract"]) == 1
    told = capsys.readouterr().out
    assert "ok    kept: sglang.srt.layers.linear\n" in told
    assert "bad   gone: sglang.srt.layers.linear.TritonLinear is gone" in told
    assert told.endswith("SGLang 0.5.99 has moved 1 of 2 symbols of 0.5.23.\n")
    assert main(["doctor", "--contract", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["moved"]["kept"] is None
