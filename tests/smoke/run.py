"""Check that every model family of the recipes starts and is correct, on one GPU, in minutes.

    make smoke                                       # on a machine with a GPU and SGLang
    python -m tests.smoke.run --families gemma4      # one family, from the root

Each family is served at its real head shapes with few layers and random weights, by three servers
at once: plain decoding and DFLASH in fp32 (Triton drafts), whose answers must be equal token for
token, and DFLASH by launch/serve.sh in bf16 (fa4 drafts). CUDA graphs, overlap scheduling and the
plan stream are on (in fp32, models with experts run without graphs and have fewer experts, and the
vocabulary is smaller); more requests run at once than the largest graph holds. The verify width is
automatic, and in fp32 also changes at every step. Then the 31B recipe starts at full size, answers
an OpenAI client, and its step is timed.

Writes the results, durations, versions and the commit to benchmarks/results/smoke-h200.json (named
after the GPU, and after the release of SGLang unless it is the newest that is served), against
which `make test` compares the serving path of the tree.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu, recipes, result_files
from sglang_dflash.glue import release
from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.server import ROOT, SCHEDULES, START_TIMEOUT_S, Server, free_port
from tests.smoke.checks import (
    WIDTHS_FILE,
    ask_plain,
    check_answers,
    check_exact,
    check_worker,
    draw_prompts,
)
from tests.smoke.families import FAMILIES, Family

PLUGINS = ROOT / "tests" / "plugins"
LARGEST_GRAPH = 4
RECIPE = recipes.Cell("gemma4-31b", "bf16", "ours", 8)
LIMIT_S = 480
KEPT_LOG = 6000  # characters of a failed server's log


class Exact(Server):
    """An fp32 server as in the exactness tests (tests/gpu.sh); on a CPU as in launch/cpu.sh."""

    script = ROOT / "tests" / "gpu.sh" if torch.cuda.is_available() else Server.script


class Deployed(Server):
    """A server as a user starts it."""

    script = ROOT / "launch" / "serve.sh"


def start(family: Family, folder: Path, *, small: bool) -> dict[str, Server]:
    """Start a family's servers concurrently, without waiting for them."""
    target = family.write_target(folder / "target-fp32", fp32=True, small=small)
    drafter = family.write_drafter(folder / "drafter-fp32", fp32=True, small=small)
    common = ["--load-format", "dummy", "--tokenizer-path", str(tiny_target())]
    common += ["--max-total-tokens", "16384", "--max-running-requests", "16"]
    common += ["--mem-fraction-static", "0.9", "--chunked-prefill-size", "128"]
    graphs = ["--cuda-graph-max-bs-decode", str(LARGEST_GRAPH), "--disable-prefill-cuda-graph"]
    # experts in plain torch read sizes on the host, which a CUDA graph cannot
    exact = ["--disable-cuda-graph"] if family.has_experts or small else graphs
    # SGLang itself may be on the path that is inherited
    path = os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "WIDE_WEIGHTS": "1", **SCHEDULES["plan stream"]}
    model = ["--model-path", str(target)]
    found: dict[str, Server] = {
        "plain": Exact(*common, *exact, *model, plain=True, env=env),
        "exact": Exact(
            *common,
            *exact,
            *model,
            "--speculative-draft-model-path",
            str(drafter),
            env=env | scripted(folder, "exact"),
        ),
    }
    if not small:
        found["deployed"] = Deployed(
            str(family.write_target(folder / "target", fp32=False)),
            str(family.write_drafter(folder / "drafter", fp32=False)),
            *common,
            *graphs,
            env=env | scripted(folder, "deployed"),
        )
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


def expected_worker(family: Family, name: str, *, small: bool) -> dict[str, Any]:
    """Return what /server_info must report for one of our servers."""
    ops = "torch" if small else "triton"
    found = {
        "ops": ops,
        "overlap_schedule": True,
        "plan_stream": True,
        "layers": f"sglang_dflash.{ops}" if family.is_gemma else "sglang",
    }
    if not small:
        found["verify_attention"] = "sglang_dflash.verify_attention"
        found["draft_attention_backend"] = "fa4" if name == "deployed" else "triton"
    return found


def run_family(family: Family, *, small: bool = False) -> dict[str, Any]:
    """Serve a family; return the check results of each server and the durations."""
    began = time.monotonic()
    found: dict[str, Any] = {"checks": {}}
    prompts = draw_prompts()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        servers = start(family, folder, small=small)
        try:
            for server in servers.values():
                server.wait()
            found["start_s"] = {name: server.start_s for name, server in servers.items()}
            asking = time.monotonic()
            wanted = ask_plain(servers["plain"], prompts)
            for name, server in servers.items():
                if name == "plain":
                    continue
                script = script_folder(folder, name)
                found["checks"][name] = (
                    check_exact(server, prompts, wanted, script)
                    if name == "exact"
                    else check_answers(server, prompts, script)
                ) | check_worker(server, expected_worker(family, name, small=small))
            found["ask_s"] = round(time.monotonic() - asking, 1)
        except Exception as error:  # one family's failure must not hide the others
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {str(error)[:2000]}"
        finally:
            for server in servers.values():
                server.stop()
        if not is_fine(found):
            found["logs"] = {name: server.log()[-KEPT_LOG:] for name, server in servers.items()}
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def run_recipe() -> dict[str, Any]:
    """Serve the 31B at full size; return its start-up, its answer and its step time."""
    began = time.monotonic()
    options = recipes.parse(
        ["--recipes", RECIPE.recipe, "--requests", "1", "8", "--port", str(free_port())]
        + ["--lengths", "73", "313", "--tries", "1", "2", "--disable-prefill-cuda-graph"]
        + ["--cuda-graph-max-bs-decode", "8"]
    )
    [(_, found)] = recipes.run_group([RECIPE], options, timeout_s=START_TIMEOUT_S)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def is_fine(found: dict[str, Any]) -> bool:
    """Return whether nothing went wrong in a family or the recipe."""
    checks = [result for each in found.get("checks", {}).values() for result in each.values()]
    return "error" not in found and all(result == "ok" for result in checks)


def result_file() -> Path:
    card = gpu.gpu_name().split()[-1].lower()
    of_release = "" if release.installed() == release.NEWEST else f"-{release.installed()}"
    return ROOT / "benchmarks" / "results" / f"smoke{of_release}-{card}.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [family.name for family in FAMILIES]
    parser.add_argument("--families", nargs="*", choices=names, default=names)
    parser.add_argument("--at-once", type=int, default=6, help="families to run on the GPU at once")
    parser.add_argument("--no-recipe", action="store_true", help="skip the full-sized 31B recipe")
    parser.add_argument(
        "--commit", help="commit to record if the tree is a copy without git history"
    )
    parser.add_argument(
        "--out", type=Path, help="default: by card and release, in benchmarks/results"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if not torch.cuda.is_available():
        raise SystemExit("The smoke test needs a GPU that torch can use; `make test` does not.")
    began = time.monotonic()
    report: dict[str, Any] = result_files.provenance(options.commit)
    chosen = [family for family in FAMILIES if family.name in options.families]
    with ThreadPoolExecutor(options.at_once) as pool:
        results = pool.map(run_family, chosen)
        report["families"] = {}
        for family, found in zip(chosen, results, strict=True):
            report["families"][family.name] = found
            print(json.dumps({family.name: found}, indent=1), flush=True)
    if not options.no_recipe:
        report["recipe"] = {RECIPE.key: run_recipe()}
        print(json.dumps(report["recipe"], indent=1), flush=True)
    parts = [*report["families"].values(), *report.get("recipe", {}).values()]
    report["passed"] = all(map(is_fine, parts))
    report["whole"] = len(chosen) == len(FAMILIES) and not options.no_recipe
    report["seconds"] = round(time.monotonic() - began, 1)
    out = options.out or result_file()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    verdict = "passed" if report["passed"] else "FAILED"
    print(f"smoke {verdict} in {report['seconds']:.0f} s (limit {LIMIT_S} s): {out}")
    raise SystemExit(0 if report["passed"] else 1)


if __name__ == "__main__":
    main()
