"""A launch that cannot succeed ends before anything is loaded, with a one-sentence message."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.glue import compat
from sglang_dflash.glue.startup import early_exit
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.testing.server import ROOT, free_port


def arguments(target: Path, drafter: Path) -> dict[str, Any]:
    return {
        "model_path": str(target),
        "speculative_draft_model_path": str(drafter),
        "speculative_algorithm": "DFLASH",
        "device": "cpu",
        "attention_backend": "torch_native",
        "port": free_port(),
    }


def command_line(target: Path, drafter: Path) -> list[str]:
    given = arguments(target, drafter).items()
    return [part for name, value in given for part in (f"--{name.replace('_', '-')}", str(value))]


def resolve(server_args: Any) -> None:
    """Resolve arguments, with releases that do so after parsing them."""
    if "resolve_once" in compat.SYMBOLS:
        server_args.resolve_once()


@pytest.mark.parametrize("absent", ["llama", "drafter"])
def test_a_folder_that_is_not_there_is_called_so(models: Path, absent: str) -> None:
    """SGLang would take it for a model name and complain about the form of the name."""
    paths = {"llama": models / "llama", "drafter": models / "drafter", absent: Path("/no/where")}
    with pytest.raises(SystemExit, match="/no/where cannot be read: there is no such folder. Pass"):
        resolve(compat.prepare_server_args(command_line(paths["llama"], paths["drafter"])))


@pytest.mark.parametrize("part", ["llama", "drafter"])
def test_a_weight_file_that_is_cut_short_is_named(models: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(models / part, tmp_path / part)
    file = tmp_path / part / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    paths = {"llama": models / "llama", "drafter": models / "drafter", part: tmp_path / part}
    with pytest.raises(
        SystemExit, match=f"{file} is not a complete safetensors file: it is cut short"
    ):
        resolve(compat.prepare_server_args(command_line(paths["llama"], paths["drafter"])))


def test_a_python_program_can_catch_the_refusal(models: Path) -> None:
    """An offline engine must not end the program that creates it."""
    with pytest.raises(ValueError, match="there is no such folder"):
        resolve(compat.ServerArgs(**arguments(models / "llama", Path("/no/where"))))


def test_a_port_in_use_is_refused(models: Path) -> None:
    pair = command_line(models / "llama", models / "drafter")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"Cannot listen on .* --port {port}: Address alre"):
            compat.prepare_server_args([*pair, "--port", str(port)])
    assert compat.prepare_server_args([*pair, "--port", str(port)]).port == port


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost"])
def test_a_free_port_passes_whatever_the_host(host: str) -> None:
    try:
        early_exit.check_port(host, free_port())
    except early_exit.Refusal as refusal:
        if "Address family not supported" not in str(refusal):
            raise


def test_the_process_ends_with_the_sentence_alone() -> None:
    done = subprocess.run(
        [ROOT / "launch" / "cpu.sh", "--speculative-num-draft-tokens", "17"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "--speculative-num-draft-tokens 17 exceeds the block size 16"
    )
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="about an environment for a CPU")
def test_serve_passes_the_doctor_in_the_environment_of_make() -> None:
    """The final message can only come from the launch of the server itself."""
    stand_ins = ROOT / "sglang_dflash" / "glue" / "cpu" / "path"
    env = {**os.environ, "PYTHONPATH": f"{stand_ins}:{ROOT}"}
    env.pop("SGLANG_USE_CPU_ENGINE", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "sglang_dflash", "serve", "--port", port]
            + ["--model-path", tiny_target(), "--speculative-draft-model-path", tiny_drafter()]
            + ["--speculative-algorithm", "DFLASH"],
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 1
    assert f"Cannot listen on --host 127.0.0.1 --port {port}: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr
