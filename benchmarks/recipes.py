"""Every recipe of launch/ at its real shapes with random weights: does it start, what does it cost.

    python benchmarks/recipes.py --recipes gemma4-26b-a4b qwen3-8b --out results/recipes

Each server is started by its recipe, with `--load-format dummy`, the folders of benchmarks/shapes
and a tokenizer added and nothing else changed but what a variant says (fp8-kv: FP8 KV cache; fp8:
FP8 target, its drafter left in bf16). It must answer an OpenAI client. Then decode speed is
measured as in serving.py: the difference between two output lengths, so that prefill drops out.

Acceptance is simulated at one length, 8 tokens a step. A step computes whole blocks whatever is
accepted, and the context at a given output token is the same, so rates at other lengths follow from
the same step time: requests * length / step time. The table marks them with ~. What this leaves out
is the host's work per token; `--verify-lengths 4` starts another server at that length, shows its
measured rate instead, and how far the derived one was off. In simulation SGLang's DFLASH commits
the drafted tokens here, as ours does: with its default, one fixed token, all requests would ask a
mixture of experts for the same experts.

Results are written after every server; a later call with the same --out adds to them and skips what
is there. `--budget-s` starts no server that would probably not be done in time. Arguments that this
script does not know go to the servers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import openai
import requests
import systems
from recipe_report import reason_of, report
from systems import ROOT, SYSTEMS

from server import NO_ANSWER, START_TIMEOUT_S, ServerProcess
from sglang_dflash.pairs import tiny_target

LAUNCH = ROOT / "launch"
SHAPES = ROOT / "benchmarks" / "shapes"
PORT = 30000  # the recipes' own
VARIANTS = {
    "bf16": [],
    "fp8-kv": ["--kv-cache-dtype", "fp8_e4m3"],
    "fp8": ["--quantization", "fp8"],
}
# all of 4, 6 and 8 divide what lies between the first token and either end
LENGTHS = (73, 313)
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


def known_recipes(shapes: Path) -> list[str]:
    """Return the recipes that have shapes to run with."""
    scripts = sorted(path.stem for path in LAUNCH.glob("*.sh") if path.stem not in ("serve", "cpu"))
    return [name for name in scripts if (shapes / name / "config.json").is_file()]


def plan(options: argparse.Namespace) -> list[Cell]:
    """Return every server asked for, those of one table row beside each other."""
    lengths = [options.accept_length, *options.verify_lengths]
    return [
        Cell(recipe, variant, system, length)
        for recipe in options.recipes
        for variant in options.variants
        for system in options.systems
        for length in ([0] if system == "plain" else lengths)
    ]


def serve(cell: Cell, options: argparse.Namespace) -> ServerProcess:
    """Start a recipe on its shapes."""
    command = [str(LAUNCH / f"{cell.recipe}.sh"), "--load-format", "dummy"]
    command += ["--tokenizer-path", str(options.tokenizer_path), *VARIANTS[cell.variant]]
    if cell.variant == "fp8" and cell.system != "plain":
        # without it SGLang quantises the drafter as well
        command += ["--speculative-draft-model-quantization", "unquant"]
    command += options.server_args
    if options.port != PORT:
        command += ["--port", str(options.port)]
    env = systems.switches(cell.system, cell.length) | {
        "TARGET": str(options.shapes / cell.recipe),
        "DRAFTER": str(options.shapes / f"{cell.recipe}-draft"),
        "PLAIN": str(int(cell.system == "plain")),
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    return ServerProcess(command, env=env, port=options.port)


def ask_openai(server: ServerProcess) -> dict[str, Any]:
    """Ask through the OpenAI client; return what came. Random weights say nothing worth reading."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
    chat = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=16,
        temperature=0,
    )
    assert chat.usage is not None
    return {"completion_tokens": chat.usage.completion_tokens}


def run_cell(cell: Cell, options: argparse.Namespace, *, timeout_s: float) -> dict[str, Any]:
    """Start a server and measure it. Raise RuntimeError with the end of its log if it fails."""
    ids = systems.prompt_ids(options.shapes / cell.recipe)
    server = serve(cell, options)
    try:
        server.wait(timeout_s=timeout_s)
        found: dict[str, Any] = {"start_s": server.start_s, "openai": ask_openai(server)}
        state = server.state()
        ours = state.get("sglang_dflash")
        assert (ours is not None) == (cell.system == "ours"), f"{cell.key} is not what serves"
        found["memory_gb"] = systems.memory_by_part(state, server.log())
        if ours is not None:
            found["ours"] = {k: v for k, v in ours.items() if k not in ("acceptance", "drafter")}
        found["points"] = []
        for num_requests in options.requests:
            rate, _, together = systems.decode_rate(
                server,
                num_requests,
                options.context,
                lengths=LENGTHS,
                repeats=options.repeats,
                ids=ids,
            )
            step_ms = 1000 * num_requests * max(cell.length, 1) / rate
            found["points"].append(
                {
                    "requests": num_requests,
                    "together": together,
                    "tokens_per_s": round(rate, 1),
                    "step_ms": round(step_ms, 3),
                }
            )
        found["command"] = [systems.short_path(word) for word in server.command]
        return found
    except (requests.RequestException, openai.OpenAIError, AssertionError) as error:
        end = server.log()[-3000:]
        raise RuntimeError(f"{error}\n{end}") from error
    finally:
        systems.stop_server(server, options.logs, cell.key.replace(" | ", "_"))


class Results:
    """What has been measured, in this call and in earlier ones with the same --out."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        path = options.out and options.out.with_suffix(".json")
        earlier = json.loads(path.read_text()) if path and path.exists() else {}
        self.cells: dict[str, Any] = earlier.pop("cells", {})
        calls: list[Any] = earlier.pop("earlier_calls", [])
        if earlier:
            calls.append({name: earlier[name] for name in ("command", "commit", "gpu")})
        self._about = systems.provenance(options.commit, hidden=("--shapes", "--tokenizer-path"))
        self._about |= {"context": options.context, "lengths": LENGTHS, "earlier_calls": calls}

    def has(self, cell: Cell) -> bool:
        found = self.cells.get(cell.key)
        return found is not None and not ("error" in found and self._options.retry)

    def add(self, cell: Cell, found: dict[str, Any]) -> None:
        """Keep a cell with the number of the call that measured it, and write everything."""
        call = len(self._about["earlier_calls"])
        self.cells[cell.key] = {**cell._asdict(), "call": call, **found}
        self.write()

    def write(self) -> None:
        if self._options.out:
            found = {**self._about, "cells": self.cells}
            systems.write(found, self._options.out, self.text())

    def text(self) -> str:
        table = report(list(self.cells.values()), shown_lengths=self._options.show_lengths)
        calls = self._about["earlier_calls"]
        if not calls:
            return table
        earlier = [f"- `{call['command']}`, commit {call['commit']}" for call in calls]
        return "\n".join([table, "\nEarlier calls that added to this table:", *earlier])


def run(options: argparse.Namespace) -> tuple[Results, list[Cell]]:
    """Measure what is missing while the budget lasts; return the results and what is left."""
    results = Results(options)
    missing = [cell for cell in plan(options) if not results.has(cell)]
    began, longest = time.monotonic(), 0.0
    while missing:
        cell = missing[0]
        left = options.budget_s - (time.monotonic() - began) if options.budget_s else float("inf")
        if left < (longest or FIRST_GUESS_S):
            break
        start = time.monotonic()
        timeout_s = min(left, START_TIMEOUT_S)
        try:
            found = run_cell(cell, options, timeout_s=timeout_s)
        except RuntimeError as error:
            if NO_ANSWER in str(error) and timeout_s < START_TIMEOUT_S:
                break
            print(error, flush=True)
            found = {"error": reason_of(str(error))}
        longest = max(longest, time.monotonic() - start)
        results.add(cell, found)
        missing.pop(0)
        print(f"{cell.key}, {time.monotonic() - start:.0f} s: {found}", flush=True)
    return results, missing


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", help="names of scripts in launch/; default: all")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["bf16"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--accept-length", type=int, default=8, help="simulated and measured")
    parser.add_argument("--verify-lengths", nargs="+", type=int, default=[], help="measured, too")
    parser.add_argument("--show-lengths", nargs="+", type=int, default=[4, 6, 8])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--shapes", type=Path, default=SHAPES)
    parser.add_argument("--tokenizer-path", type=Path, default=tiny_target())
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--budget-s", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--retry", action="store_true", help="try what failed earlier again")
    systems.add_result_options(parser, picture=False)
    options, options.server_args = parser.parse_known_args(arguments)
    known = known_recipes(options.shapes)
    options.recipes = options.recipes or known
    unknown = sorted(set(options.recipes) - set(known))
    if unknown:
        parser.error(f"no recipe with shapes in {options.shapes}: {unknown}; there are {known}")
    return options


def main() -> None:
    results, missing = run(parse())
    print(results.text())
    for cell in missing:
        print(f"not started, the budget is spent: {cell.key}")


if __name__ == "__main__":
    main()
