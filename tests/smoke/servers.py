"""The servers of the smoke test: a family with few layers, plain and with DFLASH."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.environment import COMPARE_RANKS, RANK_PATIENCE
from sglang_dflash.glue import release
from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.progress import say
from sglang_dflash.testing.server import ROOT, SCHEDULES, Server, free_port
from sglang_dflash.testing.two_ranks import TwoRanks
from tests.smoke.checks import WIDTHS_FILE
from tests.smoke.families import Family

PLUGINS = ROOT / "tests" / "plugins"
LARGEST_GRAPH = 4
GRAPHS = ("--cuda-graph-max-bs-decode", str(LARGEST_GRAPH))
FP8_DRAFTER = ("--speculative-draft-model-quantization", "fp8")
FP8_DRAFT_KV = ("--speculative-draft-kv-cache-dtype", "fp8_e4m3")
# SGLang compiles the kernel of 4-bit weights from one file, which takes six minutes otherwise
COMPILER_ENV = {"NVCC_APPEND_FLAGS": "--split-compile=8"}
# what SGLang's sampler calls, compiled on first use; servers that need it meanwhile wait. SGLang
# decides where it is kept, before FlashInfer is imported
SAMPLER = "import sglang; from flashinfer.sampling import get_sampling_module as get; get()"
# many servers compile their kernels at once
RANKS_ENV = {COMPARE_RANKS: "1", RANK_PATIENCE: "120"}


class OneRank(Server):
    """A server that is told where its rank meets itself. SGLang 0.5.17 would draw a port that any
    outgoing connection can take before it is bound, half a minute later."""

    def __init__(self, *args: str, **named: Any) -> None:
        super().__init__(*args, "--nccl-port", str(free_port()), **named)


class Exact(OneRank):
    """An fp32 server as in the exactness tests (tests/gpu.sh); on a CPU as in launch/cpu.sh."""

    script = ROOT / "tests" / "gpu.sh" if torch.cuda.is_available() else Server.script


class Deployed(OneRank):
    """A server as a user starts it."""

    script = ROOT / "launch" / "serve.sh"


class ExactRanks(TwoRanks):
    """The same as Exact, on two ranks."""

    script = Exact.script


class DeployedRanks(TwoRanks):
    """The same as Deployed, on two ranks."""

    script = Deployed.script


def start(
    family: Family, folder: Path, *, small: bool, ranks: int = 1, seeded: bool = False
) -> Iterator[tuple[str, Server]]:
    """Start a family's servers, and yield each without waiting for it: `plain`, `exact` and, but on
    a CPU, `deployed`, on so many ranks; with two, `one rank` is a plain one with a single rank. A
    quantised family has `deployed` only on a GPU, where kernels for its weights are not for fp32.

    Seeds need a mode of SGLang in which its own attention verifies: `seeded` servers are in that
    mode, and are plain and exact only.
    """
    common = arguments_of(family, seeded=seeded)
    env = environment(ranks, seeded=seeded)
    compared = {} if ranks == 1 else RANKS_ENV
    if small or family.quantisation is None:
        target = family.write_target(folder / "target-fp32", fp32=True, small=small)
        drafter = family.write_drafter(folder / "drafter-fp32", fp32=True, small=small)
        exact = [*common, *exact_arguments(family, small=small), "--model-path", str(target)]
        drafted = [*exact, "--speculative-draft-model-path", str(drafter)]
        serve: Callable[..., Server] = Exact if ranks == 1 else ExactRanks
        yield "plain", serve(*exact, plain=True, env=env)
        yield "exact", serve(*drafted, env=env | compared | scripted(folder, "exact"))
        if ranks > 1 and not seeded:
            yield "one rank", Exact(*exact, plain=True, env=env)
    if not small and not seeded:
        deploy: Callable[..., Server] = Deployed if ranks == 1 else DeployedRanks
        yield (
            "deployed",
            deploy(
                str(family.write_target(folder / "target", fp32=False)),
                str(family.write_drafter(folder / "drafter", fp32=False)),
                *common,
                *GRAPHS,
                *(FP8_DRAFTER if family.has_fp8_drafter else ()),
                *(FP8_DRAFT_KV if has_fp8_draft_kv(family) else ()),
                env=env | compared | scripted(folder, "deployed"),
            ),
        )


@contextlib.contextmanager
def compiling_sampler() -> Iterator[subprocess.Popen[bytes] | None]:
    """Compile FlashInfer's sampler while the block runs. The first sampled request would start that
    otherwise, with all servers ready, and all would wait for it, half a minute or more."""
    if importlib.util.find_spec("flashinfer") is None:
        yield None
        return
    compiler = subprocess.Popen([sys.executable, "-c", SAMPLER], env=os.environ | COMPILER_ENV)
    try:
        yield compiler
    finally:
        if compiler.poll():
            say("FlashInfer's sampler was not compiled ahead: see above. Servers tried themselves.")
        compiler.terminate()
        compiler.wait()


def has_fp8_draft_kv(family: Family) -> bool:
    """Return whether a family's deployed server has draft KV in FP8."""
    return family.has_fp8_draft_kv and release.installed() != "0.5.17"


def arguments_of(family: Family, *, seeded: bool) -> list[str]:
    """Return the arguments of all of a family's servers."""
    found = ["--load-format", "dummy", "--tokenizer-path", str(tiny_target())]
    found += ["--max-total-tokens", "8192", "--max-running-requests", "16"]
    found += ["--mem-fraction-static", "0.9", "--chunked-prefill-size", "128"]
    # an idle scheduler would keep a core busy, and there are more servers than cores
    found += ["--sleep-on-idle"]
    if seeded:
        found.append("--enable-deterministic-inference")
    if family.has_states:
        # by default, all memory that KV leaves
        found += ["--max-mamba-cache-size", "64"]
    return found


def exact_arguments(family: Family, *, small: bool) -> list[str]:
    """Return the further arguments of servers in fp32."""
    # experts in plain torch read sizes on the host, which a CUDA graph cannot
    if family.has_experts or small:
        found = ["--disable-cuda-graph"]
    else:
        found = [*GRAPHS, "--disable-prefill-cuda-graph"]
    if family.is_gpt_oss and not small:
        # SGLang's choice for gpt-oss lays out the experts for its own kernel only
        found += ["--moe-runner-backend", "triton"]
    if family.has_states and not small:
        # FlashInfer's prefill, which is SGLang's choice on Hopper, is for half precision
        found += ["--linear-attn-prefill-backend", "triton"]
    return found


def environment(ranks: int, *, seeded: bool) -> dict[str, str]:
    """Return the environment of all of a family's servers."""
    # SGLang itself may be on the path that is inherited
    path = os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")]))
    wide = "1" if ranks == 1 else "2"
    found = {"PYTHONPATH": path, "WIDE_WEIGHTS": wide, **SCHEDULES["plan stream"]}
    found |= COMPILER_ENV
    if seeded:
        # compiling SGLang's seeded sampler takes longer than all checks together
        found["TORCHDYNAMO_DISABLE"] = "1"
    return found


def scripted(folder: Path, name: str) -> dict[str, str]:
    """Return the environment of a server whose drafts and verify widths the test may set."""
    script = script_folder(folder, name)
    return {"SCRIPT_FOLDER": str(script), "WIDTHS": str(script / WIDTHS_FILE)}


def script_folder(folder: Path, name: str) -> Path:
    """Return the folder with the answers of a server's scripted drafter."""
    found = folder / name
    found.mkdir(exist_ok=True)
    return found


def expected_worker(family: Family, name: str, *, small: bool, seeded: bool) -> dict[str, Any]:
    """Return what /server_info must report for one of our servers."""
    ops = "torch" if small else "triton"
    found = {
        "ops": ops,
        "overlap_schedule": True,
        "plan_stream": True,
        "layers": f"sglang_dflash.{ops}" if family.is_gemma else "sglang",
    }
    if not small and not seeded:
        if not family.has_mla:
            found["verify_attention"] = "sglang_dflash.verify_attention"
        is_fa4 = name == "deployed" and not has_fp8_draft_kv(family)
        found["draft_attention_backend"] = "fa4" if is_fa4 else "triton"
        is_fp8 = name == "deployed" and family.has_fp8_drafter
        found["draft_weights"] = "fp8" if is_fp8 else "as released"
    return found
