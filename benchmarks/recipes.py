"""Serve every launch/ recipe at its real shapes with random weights: start-up, memory, speed.

    python -m benchmarks.recipes --recipes gemma4-26b-a4b qwen3-8b --out results/recipes

Each server is started by its recipe, adding only `--load-format dummy`, the folders of
benchmarks/shapes, a tokenizer and the variant's arguments (fp8-kv: FP8 KV cache; fp8: FP8 target,
its drafter left in bf16). Plain decoding and SGLang's DFLASH run on the attention backends that
SGLang picks. A server must answer an OpenAI client. Then decode speed is measured as in serving.py,
from the difference between two output lengths, so that prefill cancels out. `--side-by-side` starts
the servers of a recipe together and measures one after another.

Acceptance is simulated at one accept length, 8 tokens per step. A step computes whole blocks
however many tokens are accepted, and the context at a given output token is the same, so rates at
other lengths follow from the same step time: requests * length / step time. The table marks them
with ~. This ignores the host's work per token; `--verify-lengths 4` starts another server at that
length, and shows its measured rate instead and the error of the derived one. In simulation SGLang's
DFLASH commits the drafted tokens here, as ours does: its default, one fixed token, would route all
requests of a mixture of experts to the same experts.

Results are written after every server; a later call with the same --out adds to them and skips what
is there. `--budget-s` starts no server that is unlikely to finish in time. Unknown arguments are
passed to the servers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import openai
import requests

from benchmarks import ROOT, batch_load, result_files, sharing, systems
from benchmarks.recipe_report import reason_of, report
from benchmarks.systems import SYSTEMS
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.progress import Progress, say
from sglang_dflash.testing.server import NO_ANSWER, START_TIMEOUT_S, ServerProcess, free_port

LAUNCH = ROOT / "launch"
SHAPES = ROOT / "benchmarks" / "shapes"
VARIANTS = {
    "bf16": [],
    "fp8-kv": ["--kv-cache-dtype", "fp8_e4m3"],
    "fp8": ["--quantization", "fp8"],
}
# without the first token, both are divisible by 4, 6 and 8
LENGTHS = (73, 1033)
FIRST_GUESS_S = 100.0


class Cell(NamedTuple):
    """One server to start. `length` is the simulated accept length, 0 for plain decoding."""

    recipe: str
    variant: str
    system: str
    length: int

    @property
    def key(self) -> str:
        return " | ".join([self.recipe, self.variant, self.system, str(self.length)])

    def pair(self, options: argparse.Namespace) -> tuple[Path, Path]:
        """Return the folders of the target's and the drafter's shapes."""
        return options.shapes / self.recipe, options.shapes / f"{self.recipe}-draft"


def known_recipes(shapes: Path) -> list[str]:
    """Return the recipes that have shapes."""
    scripts = sorted(path.stem for path in LAUNCH.glob("*.sh") if path.stem not in ("serve", "cpu"))
    return [name for name in scripts if (shapes / name / "config.json").is_file()]


def plan(options: argparse.Namespace) -> list[Cell]:
    """Return all requested servers, grouped by table row."""
    lengths = [options.accept_length, *options.verify_lengths]
    return [
        Cell(recipe, variant, system, length)
        for recipe in options.recipes
        for variant in options.variants
        for system in options.systems
        for length in ([0] if systems.kind_of(system) == "plain" else lengths)
    ]


def tokens_needed(options: argparse.Namespace) -> int:
    """Return the KV pool size, in tokens, for the largest point."""
    return sharing.pool_tokens(max(options.requests), options.context + options.lengths[1])


def next_group(missing: list[Cell], options: argparse.Namespace) -> list[Cell]:
    """Return the cells to serve together: of one recipe and variant, as many as fit."""
    first = missing[0]
    several = sharing.at_once(options, *first.pair(options), tokens_needed(options))
    return [cell for cell in missing[:several] if cell[:2] == first[:2]]


def serve(cell: Cell, options: argparse.Namespace, *, beside: int = 0) -> ServerProcess:
    """Start a recipe on its shapes, alongside `beside` other servers."""
    target, drafter = cell.pair(options)
    command = [str(LAUNCH / f"{cell.recipe}.sh"), "--load-format", "dummy"]
    command += ["--tokenizer-path", str(options.tokenizer_path), *VARIANTS[cell.variant]]
    if cell.variant == "fp8" and systems.kind_of(cell.system) != "plain":
        # without it SGLang quantises the drafter as well
        command += ["--speculative-draft-model-quantization", "unquant"]
    command += systems.backend_args(cell.system, target, options.peer_attention_backend)
    command += sharing.server_args(tokens_needed(options)) if beside else []
    command += options.server_args
    port = free_port() if beside else options.port
    if port != batch_load.PORT:
        command += ["--port", str(port)]
    env = systems.switches(cell.system, cell.length) | {
        "TARGET": str(target),
        "DRAFTER": str(drafter),
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    return ServerProcess(command, env=env, port=port)


def ask_openai(server: ServerProcess) -> dict[str, Any]:
    """Ask through the OpenAI client; return the token count: random weights write nonsense."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
    chat = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=16,
        temperature=0,
    )
    assert chat.usage is not None
    return {"completion_tokens": chat.usage.completion_tokens}


def measure(cell: Cell, server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a running server. Raise RuntimeError with the tail of its log if it fails."""
    ids = batch_load.prompt_ids(options.shapes / cell.recipe)
    try:
        found: dict[str, Any] = {"start_s": server.start_s, "openai": ask_openai(server)}
        info = server.info()
        state = info["internal_states"][0]
        ours = state.get("sglang_dflash")
        served = systems.kind_of(cell.system) == "ours"
        assert (ours is not None) == served, f"{cell.key}: another system is serving"
        found["attention"] = systems.backends_in_use(info)
        found["memory_gb"] = systems.memory_by_part(state, server.log())
        if ours is not None:
            found["ours"] = {k: v for k, v in ours.items() if k not in ("acceptance", "drafter")}
        found["lengths"], found["points"] = options.lengths, []
        for num_requests in options.requests:
            rate = batch_load.decode_rate(
                server,
                num_requests,
                options.context,
                lengths=options.lengths,
                tries=options.tries,
                ids=ids,
            )
            step_ms = 1000 * num_requests * max(cell.length, 1) / rate.tokens_per_s
            point = {"requests": num_requests, **rate.numbers(), "step_ms": round(step_ms, 3)}
            found["points"].append(point)
        found["command"] = [result_files.short_path(word) for word in server.command]
        return found
    except (requests.RequestException, openai.OpenAIError, AssertionError) as error:
        end = server.log()[-3000:]
        raise RuntimeError(f"{error}\n{end}") from error


def run_group(
    cells: list[Cell],
    options: argparse.Namespace,
    *,
    timeout_s: float,
    have_started: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Start the servers of all cells, measure one after another, each after `have_started`, and
    yield each result."""
    beside = len(cells) - 1
    starts = {cell: partial(serve, cell, options, beside=beside) for cell in cells}

    def stop(cell: Cell, server: ServerProcess) -> None:
        systems.stop_server(server, options.logs, cell.key.replace(" | ", "_"))

    for cell, server, failed in sharing.serve_all(starts, stop, timeout_s=timeout_s):
        try:
            if failed is not None:
                raise failed
            have_started()
            found = measure(cell, server, options)
        except RuntimeError as error:
            if NO_ANSWER in str(error) and timeout_s < START_TIMEOUT_S:
                # the budget ran out, not a failure of the server
                continue
            say(str(error))
            found = {"error": reason_of(str(error))}
        yield cell, found | {"beside": beside}


class Results:
    """The measurements of this call and of earlier ones with the same --out."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        path = options.out and result_files.result_file(options.out, ".json")
        earlier = result_files.read(path, "--out", "cells") if path and path.exists() else {}
        self.cells: dict[str, Any] = earlier.pop("cells", {})
        calls: list[Any] = earlier.pop("earlier_calls", [])
        if earlier:
            calls.append({name: earlier[name] for name in ("command", "commit", "gpu")})
        hidden = ("--shapes", "--tokenizer-path")
        self._about = result_files.provenance(options.commit, hidden=hidden)
        self._about |= {"context": options.context, "earlier_calls": calls}

    def failed(self) -> list[str]:
        """Return the cells of this call that failed, now or earlier."""
        keys = [cell.key for cell in plan(self._options)]
        return [key for key in keys if "error" in self.cells.get(key, {})]

    def has(self, cell: Cell) -> bool:
        found = self.cells.get(cell.key)
        return found is not None and not ("error" in found and self._options.retry)

    def add(self, cell: Cell, found: dict[str, Any]) -> None:
        """Store a cell with the number of the call that measured it, and write all results."""
        call = len(self._about["earlier_calls"])
        self.cells[cell.key] = {**cell._asdict(), "call": call, **found}
        self.write()

    def write(self) -> None:
        if self._options.out:
            found = {**self._about, "cells": self.cells}
            result_files.write(found, self._options.out, self.text())

    def text(self) -> str:
        table = report(list(self.cells.values()), shown_lengths=self._options.show_lengths)
        calls = self._about["earlier_calls"]
        if not calls:
            return table
        earlier = [f"- `{call['command']}`, commit {call['commit']}" for call in calls]
        return "\n".join([table, "\nEarlier runs that contributed to this table:", *earlier])


def run(options: argparse.Namespace) -> tuple[Results, list[Cell]]:
    """Measure missing cells while the budget lasts; return the results and the cells left."""
    results = Results(options)
    missing = [cell for cell in plan(options) if not results.has(cell)]
    with Progress(len(missing), "cells") as progress:
        return results, run_cells(missing, results, options, progress)


def run_cells(
    missing: list[Cell], results: Results, options: argparse.Namespace, progress: Progress
) -> list[Cell]:
    """Measure cells while the budget lasts; return those that are left."""
    began, longest = time.monotonic(), 0.0
    while missing:
        left = options.budget_s - (time.monotonic() - began) if options.budget_s else float("inf")
        if left < (longest or FIRST_GUESS_S):
            break
        start = time.monotonic()
        group = next_group(missing, options)
        done = []
        for cell, found in run_group(group, options, timeout_s=min(left, START_TIMEOUT_S)):
            results.add(cell, found)
            done.append(cell)
            say(f"{cell.key}, {time.monotonic() - start:.0f} s: {found}")
            progress.step()
        longest = max(longest, time.monotonic() - start)
        missing = [cell for cell in missing if cell not in done]
        if len(done) < len(group):
            break
    return missing


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--recipes", nargs="+", help="names of scripts in launch/; default: all")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        default=["bf16"],
        help="fp8-kv: FP8 KV cache; fp8: FP8 target; default: bf16",
    )
    systems.add_systems_option(parser, systems.system_name, SYSTEMS)
    systems.add_backend_option(parser)
    parser.add_argument(
        "--context", type=int, default=512, help="tokens of a prompt; default: %(default)s"
    )
    parser.add_argument(
        "--accept-length",
        type=int,
        default=8,
        help="accept length to simulate and measure; default: %(default)s",
    )
    parser.add_argument(
        "--verify-lengths",
        nargs="+",
        type=int,
        default=[],
        help="further accept lengths to measure; default: none",
    )
    parser.add_argument(
        "--show-lengths",
        nargs="+",
        type=int,
        default=[4, 6, 8],
        help="accept lengths in the table; default: 4 6 8",
    )
    batch_load.add_load_options(parser, lengths=LENGTHS)
    sharing.add_options(parser)
    parser.add_argument(
        "--shapes",
        type=Path,
        default=SHAPES,
        help="folder of the recipes' configs; default: benchmarks/shapes",
    )
    parser.add_argument(
        "--tokenizer-path",
        type=Path,
        default=tiny_target(),
        help="tokenizer of all servers; default: that of the embedded target",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=0.0,
        help="seconds of the call; no server is started that is unlikely to end in time; "
        "default: 0, no limit",
    )
    parser.add_argument("--retry", action="store_true", help="retry what failed earlier")
    result_files.add_result_options(parser, picture=False)
    return parser


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    options.server_args = unknown
    batch_load.check_load_options(parser, options)
    known = known_recipes(options.shapes)
    options.recipes = options.recipes or known
    strange = sorted(set(options.recipes) - set(known))
    if strange:
        parser.error(f"--recipes {strange}: no shapes in {options.shapes}; available: {known}")
    return options


def main() -> None:
    results, missing = run(parse())
    print(results.text())
    for cell in missing:
        print(f"not started, the time budget is used up: {cell.key}")
    if results.failed():
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("recipes", main))
