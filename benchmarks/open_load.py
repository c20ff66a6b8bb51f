"""Serve requests that arrive at random times: throughput and latency over the rate of arrivals.

    python -m benchmarks.open_load --prompts DIR/*.jsonl --model-path M --draft-model-path D \\
        --rates 1 2 4 8 16 --out results/open-load

Requests arrive as in a Poisson process, --seconds long at each of the rising --rates, whether or
not earlier ones have been answered. Each line of the prompt files is an object with `turns` (the
first is asked), `prompt` or `question`. Prompts, arrivals and --max-tokens are the same for all
systems: `plain`, `ours-16` (whole blocks are verified) and `ours` (automatic width). Answers are
greedy, end as the model ends them, and are streamed from SGLang's /generate.

For each rate: output tokens per second from the first arrival to the last answer's end; time to
the first token, from the request's arrival; and time per output token after it, per request. Where
the server cannot keep up, times grow with --seconds. Writes OUT.json and OUT.md after every point;
`--budget-s` starts no point after that time. `--side-by-side` starts the servers together and
measures one after another. Unknown arguments are passed to all servers. Without a GPU,
launch/cpu.sh serves the embedded pair.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import requests

from benchmarks import (
    ROOT,
    batch_load,
    load_servers,
    real_text,
    result_files,
    sharing,
    systems,
)
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.testing.progress import Progress, say
from sglang_dflash.testing.server import ServerProcess

SYSTEMS = ("plain", "ours-16", "ours")
RATES = (1.0, 2.0, 4.0, 8.0, 16.0)
MOST_WAITING = 1024  # requests in flight; each has a thread
POOLED_REQUESTS = 256  # for which KV pools have room when servers run side by side
WARM_UP_REQUESTS = 8
REQUEST_TIMEOUT_S = 600
MOST_BYTES = 65536  # read at once; less arrives as it comes
SHARES = (50, 99)  # percentiles in the table


class Answer(NamedTuple):
    """When a streamed answer came, in seconds after the first request's arrival."""

    arrived: float
    first: float  # the first token's time
    ended: float
    first_tokens: int  # that came with it
    tokens: int

    @property
    def to_first_token(self) -> float:
        return self.first - self.arrived

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first; None if none followed."""
        later = self.tokens - self.first_tokens
        return (self.ended - self.first) / later if later > 0 else None


def arrivals(rate: float, seconds: float) -> list[float]:
    """Return the times of a Poisson process, from 0 on; the same for every call."""
    chance = random.Random(f"{rate} {seconds}")
    found = [0.0]
    while (later := found[-1] + chance.expovariate(rate)) < seconds:
        found.append(later)
    return found


def read_stream(lines: Iterable[bytes], arrived: float, now: Callable[[], float]) -> Answer:
    """Follow a streamed answer to its end. Only its first and last parts are parsed: the client
    must not be what limits the rate."""
    first = last = b""
    began = ended = 0.0
    for line in lines:
        if line.startswith(b"data: {"):
            last, ended = line, now()
            if not first:
                first, began = last, ended
    if not last:
        raise RuntimeError("the answer has no tokens")
    counts = []
    for part in (first, last):
        meta = json.loads(part.removeprefix(b"data: ")).get("meta_info")
        if meta is None:
            raise RuntimeError(f"the server answered {part[:300]!r}")
        counts.append(meta["completion_tokens"])
    return Answer(arrived, began, ended, *counts)


def run_point(
    url: str, prompts: Sequence[list[int]], times: Sequence[float], max_tokens: int
) -> tuple[list[Answer], list[str]]:
    """Send a request at each of the times; return the answers and the failures."""
    began = time.monotonic()
    failures: list[str] = []

    def one(number: int) -> Answer | None:
        params = {"temperature": 0.0, "max_new_tokens": max_tokens}
        ids = prompts[number % len(prompts)]
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": params, "stream": True}
        try:
            with requests.post(
                f"{url}/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S
            ) as reply:
                reply.raise_for_status()
                lines = reply.iter_lines(chunk_size=MOST_BYTES)
                return read_stream(lines, times[number], lambda: time.monotonic() - began)
        except (RuntimeError, requests.RequestException) as error:
            failures.append(f"request {number}: {error}")
            return None

    with ThreadPoolExecutor(min(len(times), MOST_WAITING)) as pool:
        waiting = []
        for number, at in enumerate(times):
            time.sleep(max(0.0, began + at - time.monotonic()))
            waiting.append(pool.submit(one, number))
        answers = [future.result() for future in waiting]
    return [answer for answer in answers if answer is not None], failures


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that is not below this percentage of the values."""
    if not values:
        return None
    place = -(-len(values) * share // 100)
    return sorted(values)[max(int(place) - 1, 0)]


def numbers(rate: float, answers: Sequence[Answer], failures: Sequence[str]) -> dict[str, Any]:
    """Return a point's fields in the result file."""
    seconds = max((answer.ended for answer in answers), default=0.0)
    first_ms = [round(1000 * answer.to_first_token, 2) for answer in answers]
    token_ms = [
        round(1000 * each, 3) for answer in answers if (each := answer.per_token) is not None
    ]
    return {
        "rate": rate,
        "requests": len(answers) + len(failures),
        "failures": list(failures[:5]),
        "failed": len(failures),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(a.tokens for a in answers) / seconds, 1) if seconds else 0.0,
        "first_token_ms": {str(share): percentile(first_ms, share) for share in SHARES},
        "ms_per_token": {str(share): percentile(token_ms, share) for share in SHARES},
    }


def table(results: dict[str, Any]) -> str:
    """Return a row per rate and system."""
    titles = ["requests/s", "system", "tokens/s"]
    titles += [f"ms per token, p{share}" for share in SHARES]
    titles += [f"ms to the first token, p{share}" for share in SHARES]
    lines = ["| " + " | ".join([*titles, "failed"]) + " |", "|" + "---|" * (len(titles) + 1)]
    points = [(p["rate"], name, p) for name, result in results.items() for p in result["points"]]
    for rate, name, point in sorted(points, key=lambda each: each[0]):
        cells = [f"{rate:g}", name, f"{point['tokens_per_s']:.1f}"]
        for field in ("ms_per_token", "first_token_ms"):
            values = [point[field][str(share)] for share in SHARES]
            cells += ["" if value is None else f"{value:.1f}" for value in values]
        lines.append("| " + " | ".join([*cells, str(point["failed"] or "")]) + " |")
    errors = [f"{name} failed: {r['error']}" for name, r in results.items() if "error" in r]
    return "\n\n".join(["\n".join(lines), *errors, systems.backends_line(results)]).strip()


def measure(
    system: str,
    server: ServerProcess,
    prompts: list[list[int]],
    options: argparse.Namespace,
    late: Callable[[], bool],
    progress: Progress,
) -> Iterable[dict[str, Any]]:
    """Measure a running server; yield what is known of its system after every point."""
    info = server.info()
    load_servers.check_system(system, info)
    result: dict[str, Any] = {"start_s": server.start_s, "points": []}
    result["attention"] = systems.backends_in_use(info)
    # kernels are built at their first use; all at once, so that batches are decoded, too
    run_point(server.url, prompts, [0.0] * WARM_UP_REQUESTS, options.max_tokens)
    for rate in sorted(options.rates):
        if late():
            break
        server.flush_cache()
        times = arrivals(rate, options.seconds)
        found = run_point(server.url, prompts, times, options.max_tokens)
        result["points"].append(numbers(rate, *found))
        say(f"{system}: {result['points'][-1]}")
        progress.step()
        yield result


def groups(options: argparse.Namespace, longest_prompt: int) -> Iterable[tuple[list[str], int]]:
    """Return the systems to start together, and the tokens of their KV pools."""
    tokens = sharing.pool_tokens(POOLED_REQUESTS, longest_prompt + options.max_tokens)
    several = sharing.at_once(options, options.model_path, options.draft_model_path, tokens)
    for first in range(0, len(options.systems), several):
        yield options.systems[first : first + several], tokens


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--prompts", nargs="+", type=Path, required=True, help="jsonl files of questions"
    )
    parser.add_argument(
        "--model-path", help="target: a folder or a model name; default: the embedded pair"
    )
    parser.add_argument("--draft-model-path", help="its drafter, if --model-path is given")
    systems.add_systems_option(parser, systems.name_of_width, SYSTEMS)
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=list(RATES),
        help="requests per second; default: 1 2 4 8 16",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="seconds of arrivals at each rate; default: %(default)g",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="limit for an answer; default: %(default)s"
    )
    batch_load.add_budget_option(parser)
    systems.add_backend_option(parser)
    sharing.add_options(parser)
    result_files.add_result_options(parser, picture=False)
    options, unknown = parser.parse_known_args(arguments)
    options.server_args = unknown
    if bool(options.model_path) != bool(options.draft_model_path):
        parser.error("--model-path and --draft-model-path go together: pass both or neither")
    for path in options.prompts:
        if not path.is_file():
            parser.error(f"--prompts {path}: no such file")
    if min(options.rates) <= 0:
        parser.error("--rates: pass numbers above 0")
    options.model_path = options.model_path or str(tiny_target())
    options.draft_model_path = options.draft_model_path or str(tiny_drafter())
    options.out = options.out or ROOT / "benchmarks" / "results" / "open-load"
    return options


def main() -> None:
    options = parse()
    began = time.monotonic()
    found = result_files.provenance(options.commit)
    found |= {"model": Path(options.model_path).name, "seconds": options.seconds, "results": {}}
    prompts = real_text.to_ids(options.model_path, real_text.read_prompts(options.prompts))

    def late() -> bool:
        return bool(options.budget_s) and time.monotonic() - began > options.budget_s

    def stop(name: str, server: ServerProcess) -> None:
        systems.stop_server(server, options.logs, name)

    with Progress(len(options.systems) * len(options.rates), "points") as progress:
        for names, tokens in groups(options, max(map(len, prompts))):
            neighbourly = sharing.server_args(tokens) if len(names) > 1 else []
            starts = {
                name: partial(systems.serve, name, options, neighbourly=neighbourly)
                for name in names
            }
            for name, server, failed in sharing.serve_all(starts, stop):
                results = found["results"]
                try:
                    if failed is not None:
                        raise failed
                    for result in measure(name, server, prompts, options, late, progress):
                        results[name] = result
                        result_files.write(found, options.out, table(results))
                except (RuntimeError, requests.RequestException) as error:
                    say(f"{name}: {error}")
                    results[name] = {
                        "points": [],
                        **results.get(name, {}),
                        "error": str(error)[-2000:],
                    }
                    result_files.write(found, options.out, table(results))
    print(table(found["results"]))
    if any("error" in result for result in found["results"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("open_load", main))
