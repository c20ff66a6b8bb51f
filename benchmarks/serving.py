"""Compare the decode speed of plain decoding, SGLang's DFLASH and ours on one GPU, in one run.

    python -m benchmarks.serving --model-path M --draft-model-path D --load-format dummy \\
        --simulate-accept-length 8 --requests 1 8 32 --contexts 512 --out benchmarks/results/serving

Each system serves alone, with the same prompts. Decode rates come from the difference between two
output lengths, so that prefill and start-up cancel out. Writes OUT.json (command, commit, versions,
GPU), OUT.md (the table) and OUT.png (speed-up over requests) after each batch; rerunning the
command measures what is missing. `--picture OUT.json` rewrites table and plot. Unknown arguments
are passed to the servers. Without a GPU, launch/cpu.sh starts them.

Plain decoding and SGLang's DFLASH run on the attention backends that SGLang picks. A system such as
`in-tree-fa4` or `plain-triton` names its target's; `--attention-backend` sets that of all systems.
Neither needs this project's package, so `--systems plain in-tree` measures another SGLang release.

The gain from overlap scheduling: `--systems ours-in-turn ours ours-plan-stream --trace`.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
import torch

from benchmarks import batch_load, result_files, systems
from benchmarks.batch_load import SAMPLING, decode_rate, draw_prompts, run_batch
from benchmarks.systems import SYSTEMS
from benchmarks.trace_split import report, split
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.testing.progress import Progress, say
from sglang_dflash.testing.server import ServerProcess

PROFILED_STEPS = 10


def serve(system: str, options: argparse.Namespace) -> ServerProcess:
    """Start one system's server."""
    command = systems.server_command(system, options, options.block_size)
    env = systems.switches(system, options.simulate_accept_length)
    return ServerProcess([*command, *options.server_args], env=env, port=options.port)


def measure(
    server: ServerProcess,
    num_requests: int,
    context: int,
    sampling: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the decode rate of one point, from the fastest try at each length."""
    found = decode_rate(
        server,
        num_requests,
        context,
        sampling,
        lengths=options.lengths,
        tries=options.tries,
        ids=options.ids,
    )
    rate, answers = found.tokens_per_s, found.answers
    point = {
        "requests": num_requests,
        "context": context,
        "sampling": sampling,
        **found.numbers(),
        "ms_per_token": round(1000 * num_requests / rate, 3),
    }
    simulated = any(a["meta_info"].get("spec_verify_ct") for a in answers)
    per_step = options.simulate_accept_length if simulated else 0.0
    per_step = per_step or accept_length(answers)
    return point | {
        "accept_length": round(per_step, 3),
        "step_ms": round(1000 * num_requests * per_step / rate, 2),
        # simulated text is nonsense, and sampled text is not reproducible
        "output_ids": None
        if options.simulate_accept_length or sampling != "greedy"
        else [answer["output_ids"] for answer in answers],
    }


def accept_length(answers: list[dict[str, Any]]) -> float:
    """Return the mean tokens per step that SGLang reports; 1 without speculation."""
    found = [a["meta_info"].get("spec_accept_length") or 1.0 for a in answers]
    return sum(found) / len(found)


def profile(
    num_requests: int, context: int, options: argparse.Namespace, *, keep: Path | None
) -> dict[str, Any]:
    """Return the breakdown of a step's GPU time, from a trace of some steps under load.

    The trace is copied into the folder `keep`, if given.
    """
    prompts = draw_prompts(num_requests, context, "profile", options.ids)
    load = threading.Thread(target=run_until_aborted, args=(options.url, prompts))
    with tempfile.TemporaryDirectory() as folder:
        load.start()
        time.sleep(2.0 if num_requests <= 8 else 4.0)
        body: dict[str, Any] = {"output_dir": folder, "num_steps": PROFILED_STEPS}
        body["activities"] = ["GPU"]
        requests.post(f"{options.url}/start_profile", json=body, timeout=60).raise_for_status()
        deadline = time.monotonic() + 30
        while not (traces := list(Path(folder).glob("**/*.gz"))) and time.monotonic() < deadline:
            time.sleep(0.5)
        body = {"rid": "", "abort_all": True}
        requests.post(f"{options.url}/abort_request", json=body, timeout=60).raise_for_status()
        load.join()
        if not traces:
            raise RuntimeError(f"the profiler wrote no trace at {num_requests} requests")
        time.sleep(2)  # until the file is complete
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(traces[0], keep / f"trace-{num_requests}-{context}.json.gz")
        found = split(traces[0])
    say(f"{num_requests} requests of {context}: {report(found)}")
    return {"requests": num_requests, "context": context, **found}


def run_until_aborted(url: str, prompts: list[list[int]]) -> None:
    """Send a batch that is long enough to be still decoding when the profiler starts."""
    with contextlib.suppress(RuntimeError, requests.RequestException):
        run_batch(url, prompts, 1600, "greedy")


def batches(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the contexts and numbers of requests to measure."""
    return [
        (context, num_requests)
        for context in options.contexts
        for num_requests in options.requests
        if context * num_requests <= options.max_tokens
    ]


def run_system(
    system: str,
    options: argparse.Namespace,
    found: dict[str, Any],
    *,
    on_batch: Callable[[], None],
    progress: Progress,
) -> None:
    """Add to `found` the batches of one system that it lacks."""
    missing = missing_batches(found, options)
    server = serve(system, options)
    try:
        server.wait()
        say(f"{system}: ready after {server.start_s:.0f} s")
        found.setdefault("start_s", server.start_s)
        found["command"] = server.command[3:]
        found["attention"] = systems.backends_in_use(server.info())
        state = server.state()
        if torch.cuda.is_available() and "memory_usage" in state:
            found["memory_gb"] = systems.memory_by_part(state, server.log())
        for context, num_requests in missing:
            points = []
            for sampling in options.sampling:
                point = measure(server, num_requests, context, sampling, options)
                shown = {k: v for k, v in point.items() if k != "output_ids"}
                say(f"{system}: {shown}")
                progress.step()
                points.append(point)
            if options.trace:
                # a failed trace must not lose the measurements
                try:
                    keep = options.logs and options.logs / system
                    traced = profile(num_requests, context, options, keep=keep)
                    found.setdefault("gpu_time", []).append(traced)
                except (RuntimeError, requests.RequestException, SystemExit) as error:
                    say(f"no trace: {error}")
            found.setdefault("points", []).extend(points)
            on_batch()
    finally:
        systems.stop_server(server, options.logs, system)


def missing_batches(found: dict[str, Any], options: argparse.Namespace) -> list[tuple[int, int]]:
    measured = {(point["context"], point["requests"]) for point in found.get("points", ())}
    return [batch for batch in batches(options) if batch not in measured]


def compare_outputs(results: dict[str, Any]) -> dict[str, Any]:
    """Compare each greedy answer with plain decoding's."""
    found = {}
    texts = {
        (system, p["context"], p["requests"]): p["output_ids"]
        for system, result in results.items()
        for p in result.get("points", ())
        if p["output_ids"] is not None
    }
    for (system, context, num_requests), ids in texts.items():
        plain = texts.get(("plain", context, num_requests))
        if system == "plain" or plain is None:
            continue
        equal = sum(a == b for a, b in zip(ids, plain, strict=True))
        found[f"{system}, {num_requests} requests of {context}"] = f"{equal} of {len(plain)} equal"
    return found


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model-path", help="target: a folder or a model name")
    add("--draft-model-path", help="drafter: a folder or a model name")
    systems.add_systems_option(parser, systems.system_name, SYSTEMS)
    add("--contexts", nargs="+", type=int, default=[512], help="tokens of a prompt; default: 512")
    add(
        "--sampling",
        nargs="+",
        choices=list(SAMPLING),
        default=["greedy"],
        help="sampled: at temperature 1; default: greedy",
    )
    add(
        "--max-tokens",
        type=int,
        default=200_000,
        help="skip batches with more prompt tokens than this; default: %(default)s",
    )
    batch_load.add_load_options(parser, lengths=(64, 320))
    add(
        "--simulate-accept-length",
        type=float,
        default=0.0,
        help="accept length to simulate; default: 0, none",
    )
    add("--block-size", type=int, default=16, help="of both DFLASH systems; default: %(default)s")
    systems.add_backend_option(parser)
    add("--load-format", default="auto", help="of SGLang; dummy: random weights; default: auto")
    add("--trace", action="store_true", help="also break down the GPU time of a step")
    result_files.add_result_options(parser, picture=True)
    options, unknown = parser.parse_known_args()
    options.server_args = unknown
    batch_load.check_load_options(parser, options)
    if options.picture is None and not (options.model_path and options.draft_model_path):
        parser.error("--model-path and --draft-model-path are required to measure")
    if options.picture is None and not batches(options):
        parser.error(
            f"--max-tokens {options.max_tokens} leaves no batch of {options.requests} requests and "
            f"contexts of {options.contexts}. Pass a larger one, or smaller batches."
        )
    options.url = f"http://127.0.0.1:{options.port}"
    if options.picture is None:
        options.ids = batch_load.prompt_ids(options.model_path)
    return options


def main() -> None:
    options = parse()
    if options.picture:
        result_files.rewrite(options.picture, table, draw)
        return
    results = earlier(options)

    def keep() -> None:
        if options.out:
            write(finding(results, options), options.out)

    each = len(batches(options)) * len(options.sampling)
    with Progress(len(options.systems) * each, "points") as progress:
        for done, system in enumerate(options.systems, start=1):
            found = results.setdefault(system, {})
            missing = len(missing_batches(found, options)) * len(options.sampling)
            progress.reach(done * each - missing)
            if not missing:
                path = result_files.result_file(options.out, ".json")
                say(f"{system}: already measured, see {path}")
                continue
            try:
                run_system(system, options, found, on_batch=keep, progress=progress)
            except (RuntimeError, requests.RequestException) as error:
                say(f"{system}: {error}")
                found["error"] = str(error)[-2000:]
                keep()
            progress.reach(done * each)
    print(table(results))
    for what, equal in compare_outputs(results).items():
        print(f"{what}: {equal}")
    if any("error" in result for result in results.values()):
        raise SystemExit(1)


def finding(results: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    return {
        **result_files.provenance(options.commit),
        "agreement_with_plain": compare_outputs(results),
        "results": results,
    }


def earlier(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was already measured by the same command at the same commit."""
    path = options.out and result_files.result_file(options.out, ".json")
    if not path or not path.exists():
        return {}
    found = result_files.read(path, "--out", "results")
    about = result_files.provenance(options.commit)
    differing = [name for name in about if found.get(name) != about[name]]
    if differing:
        raise SystemExit(
            f"{path} was measured differently: {', '.join(differing)} differ. Pass another --out."
        )
    for result in found["results"].values():
        result.pop("error", None)
    return found["results"]


def write(found: dict[str, Any], out: Path) -> None:
    result_files.write(found, out, table(found["results"]), draw)


def rates(results: dict[str, Any]) -> dict[tuple[str, int, int], dict[str, dict[str, Any]]]:
    """Return {(sampling, context, requests): {system: point}}, sorted."""
    rows: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for system, result in results.items():
        for point in result.get("points", ()):
            key = (point.get("sampling", "greedy"), point["context"], point["requests"])
            rows.setdefault(key, {})[system] = point
    return dict(sorted(rows.items()))


def table(results: dict[str, Any]) -> str:
    """Return the rates as Markdown, a row per point and a column per system."""
    peers = [name for name in results if systems.kind_of(name) == "in-tree" and "ours" in results]
    titles = ["sampling", "context", "requests"]
    titles += [f"{system}, tok/s (step, ms)" for system in results]
    titles += [f"ours / {peer}" for peer in peers]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for point, found in rates(results).items():
        cells = [*map(str, point), *(rate_cell(found[s]) if s in found else "" for s in results)]
        cells += [ratio_cell(found, peer) for peer in peers]
        lines.append("| " + " | ".join(cells) + " |")
    about = systems.backends_line(results)
    return "\n".join([*lines, *(["", about] if about else []), *gpu_times(results)])


def ratio_cell(found: dict[str, Any], peer: str) -> str:
    if not {"ours", peer} <= set(found):
        return ""
    return f"{found['ours']['tokens_per_s'] / found[peer]['tokens_per_s']:.2f}x"


def rate_cell(point: dict[str, Any]) -> str:
    rate = f"{point['tokens_per_s']:.1f} ({point['step_ms']:.2f})"
    if result_files.is_unsteady(point):
        rate += f", tries {point['spread']:.0%} apart"
    together = point.get("together", point["requests"])
    if together == point["requests"]:
        return rate
    return f"{rate}, {f'only {together} at once' if together else 'with retractions'}"


def gpu_times(results: dict[str, Any]) -> list[str]:
    """Return a table of the GPU time of greedy steps, for the systems that were traced."""
    traced = [
        (split["context"], split["requests"], name, split["parts_ms"])
        for name, result in results.items()
        for split in result.get("gpu_time", [])
    ]
    if not traced:
        return []
    parts = list(dict.fromkeys(part for *_, found in traced for part in found))
    titles = ["GPU time of a step, ms: context", "requests", "system", *parts]
    lines = ["", "| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for context, num_requests, name, found in sorted(traced, key=lambda row: row[:2]):
        cells = [f"{found[part]:.2f}" if part in found else "" for part in parts]
        lines.append("| " + " | ".join([str(context), str(num_requests), name, *cells]) + " |")
    return lines


def draw(found: dict[str, Any], path: Path) -> None:
    """Plot rate over requests: a line per system, a panel per context and sampling mode."""
    rows = rates(found["results"])
    panels: dict[str, dict[str, result_files.Line]] = {}
    for panel in sorted({key[:2] for key in rows}):
        here = {key[2]: point for key, point in rows.items() if key[:2] == panel}
        panels[f"{panel[0]}, context {panel[1]}"] = {
            system: [(n, s[system]["tokens_per_s"]) for n, s in here.items() if system in s]
            for system in found["results"]
        }
    result_files.draw_rates(panels, found, path)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("serving", main))
