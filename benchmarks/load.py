"""Compare decode rates over load: plain decoding, a fixed block of 16 and the automatic width.

    python -m benchmarks.load --shapes gemma4-31b --mem-fraction-static 0.88 \\
        --swa-full-tokens-ratio 1 --disable-prefill-cuda-graph

Random weights at real shapes. Acceptance is simulated: each request draws its number of correct
drafts in each step from the survival profile that its request id names, so one server serves all
profiles. `accept4.2` is geometric with a mean of 4.2 tokens per step, `accept1` is always wrong,
`accept2+accept8` gives half of the requests each, and `recorded` was recorded with the SmolLM2
pair. Plain decoding needs no profile. With `--prompts FILE.jsonl ...` the pair answers real
questions instead: each file is a profile, at each of `--temperatures`. Systems: `plain`, `ours`
(automatic width), `ours-uniform` (automatic, the same for all requests of a step) and `ours-N` (N
rows per request). `--in-tree 4.2 8` adds SGLang's DFLASH, which simulates one length per server,
the same for all requests; with `--prompts` it is a system like the others, `in-tree`.
`--side-by-side` starts small models' servers together.

A point is measured in rounds: all of its requests start together, and the steps in which they go
from --from-tokens to --to-tokens generated tokens are timed, on average over the requests
(benchmarks/load_windows.py). So all systems are measured at the same contexts. Rounds with fresh
requests follow, at most --rounds, until each of two windows, which take them in turn, has
--seconds, and the two agree; with real questions the windows ask the same ones. Servers side by
side take turns, too, a round each, and a window's rate is the median of its rounds: how fast a host
is drifts by the second, and what a small model makes of it. Ratios of systems that took turns are
medians over their pairs of rounds, with an interval (benchmarks/paired.py): more --rounds and
--seconds make it narrower, while the windows may stay apart on such a host. A round before all
others is not timed, nor longer than --warm-seconds: in it the automatic width learns the profile.
If the KV pool is too small, as with 256 requests of the 31B, stretches end at fewer tokens, and the
table marks it.

Writes OUT.json and OUT.md after every point and OUT.png after every system. `--into FILE.json` adds
to the results of earlier calls at the same commit and measures only what is missing there;
`--budget-s` starts no point after that time. `--picture FILE.json` rewrites table and plot. Unknown
arguments are passed to all servers. Without a GPU, launch/cpu.sh serves the embedded pair.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import requests
import torch

from benchmarks import (
    ROOT,
    batch_load,
    gpu,
    load_windows,
    real_text,
    result_files,
    sharing,
    systems,
)
from benchmarks.load_options import SHAPES, complaint, make_parser
from benchmarks.load_points import Point, Questions, RandomPrompts, Text, measure_in_turn
from benchmarks.load_report import draw, report
from benchmarks.load_servers import (
    FIXED_MOST,
    Place,
    Start,
    check_system,
    groups_of,
    server_command,
    starts_of,
    switches,
)
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.testing.progress import Progress, say
from sglang_dflash.testing.server import ServerProcess, free_port

START_S = 80.0  # estimates: to start a server, and around the windows of a point
AROUND_S = 5.0
# of a point, only in the result file
UNTOLD = ("windows", "rounds")


class Ready(NamedTuple):
    """A server that answers, and its /server_info."""

    server: ServerProcess
    info: dict[str, Any]


class Run:
    """All systems over all points, with the results of earlier calls."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found = result_files.provenance(options.commit, hidden=["--into"], named=["--prompts"])
        self.found |= {"model": Path(options.model_path).name, "prompt": options.prompt}
        self.found["tokens"] = [options.from_tokens, options.to_tokens]
        if options.prompts:
            del self.found["prompt"]
            self.found["texts"] = sorted(path.stem for path in options.prompts)
        self.found |= {"earlier_calls": [], "results": {}}
        self._questions: dict[str, Questions] = {}
        if options.into:
            merge(self.found, options.into)
        self._began = time.monotonic()

    def missing(self, start: Start) -> list[Place]:
        done = self.found["results"].get(start.system, {}).get("points", ())
        keys = {(point["profile"], point["requests"]) for point in done}
        return [point for point in start.points(self.options.requests) if point not in keys]

    def estimate_s(self) -> float:
        point = 2 * self.options.seconds + AROUND_S
        counts = [len(self.missing(start)) for start in starts_of(self.options)]
        return sum(START_S + count * point for count in counts if count)

    def run(self) -> None:
        say(f"about {self.estimate_s() / 60:.0f} minutes; writes {self.options.out}")
        starts = [start for start in starts_of(self.options) if self.missing(start)]
        tokens = self._tokens_needed()
        pair = (self.options.model_path, self.options.draft_model_path)
        several = sharing.at_once(self.options, *pair, tokens)
        with Progress(sum(len(self.missing(start)) for start in starts), "points") as progress:
            for first in range(0, len(starts), several):
                if not self._is_late():
                    self._run_group(starts[first : first + several], tokens, progress)

    def _run_group(self, starts: list[Start], tokens: int, progress: Progress) -> None:
        """Start the servers together, and measure them in turn."""
        neighbourly = sharing.server_args(tokens) if len(starts) > 1 else []
        serving = {start: partial(self._serve, start, neighbourly) for start in starts}

        def stop(start: Start, server: ServerProcess) -> None:
            name = f"{start.system}{start.length or ''}"
            systems.stop_server(server, self.options.logs, name)

        with sharing.serve_together(serving, stop) as (running, failed):
            ready = {}
            for start, server in running.items():
                result = self.found["results"].setdefault(start.system, {"points": []})
                result.pop("error", None)
                result |= {"skipped": [], "beside": len(starts) - 1}
                if start.is_fixed and max(self.options.requests) > FIXED_MOST:
                    result["skipped"].append(f"more than {FIXED_MOST} requests")
                try:
                    if start in failed:
                        raise failed[start]
                    ready[start] = Ready(server, self._describe(start, server, result))
                except (RuntimeError, requests.RequestException) as error:
                    self._note_failure(start, error)
            self._measure_all(ready, progress)
        self.write(picture=True)

    def _note_failure(self, start: Start, error: Exception) -> None:
        say(f"{start.system}: {error}")
        self.found["results"][start.system]["error"] = str(error)[-2000:]

    def _serve(self, start: Start, neighbourly: list[str]) -> ServerProcess:
        options = argparse.Namespace(**vars(self.options))
        options.server_args = [*neighbourly, *options.server_args]
        if neighbourly:
            options.port = free_port()
        running = max(n for _, n in start.points(options.requests))
        command = server_command(start, running, options)
        env = switches(start, simulates=not options.prompts)
        return ServerProcess(command, env=env, port=options.port)

    def _describe(
        self, start: Start, server: ServerProcess, result: dict[str, Any]
    ) -> dict[str, Any]:
        """Note how a server was started and what it runs on; return its /server_info."""
        info = server.info()
        say(f"{start.system}: ready after {server.start_s:.0f} s")
        check_system(start.system, info)
        result |= {"start_s": server.start_s, "attention": systems.backends_in_use(info)}
        result["command"] = [result_files.short_path(word) for word in server.command]
        return info

    def _measure_all(self, ready: dict[Start, Ready], progress: Progress) -> None:
        """Measure what is missing, point by point: all servers that have one take turns in it."""
        turns = sharing.Turns([server for server, _ in ready.values()])
        for group in groups_of({start: self.missing(start) for start in ready}):
            group = {start: place for start, place in group.items() if start in ready}
            if not group:
                continue
            progress.name(
                ", ".join(f"{p or 'plain'} at {n}" for p, n in dict.fromkeys(group.values()))
            )
            if self._is_late():
                for start, place in group.items():
                    self._skip(start, place, "out of time")
                continue
            for start, error in self._measure(group, ready, turns).items():
                self._note_failure(start, error)
                del ready[start]
            for _ in group:
                progress.step()
            self.write(picture=False)

    def _measure(
        self, group: dict[Start, Place], ready: dict[Start, Ready], turns: sharing.Turns
    ) -> dict[Start, requests.RequestException]:
        """Measure a point of each server, in turn; return those that do not answer any more."""
        options, points = self.options, {}
        most = load_windows.AHEAD * options.to_tokens
        for start, (profile, n) in group.items():
            server, info = ready[start]
            prompts = self._prompts_of(profile)
            try:
                room = load_windows.room_for(info, n, prompts.longest, most)
            except RuntimeError as error:
                self._skip(start, (profile, n), str(error))
                continue
            points[start] = Point(server, profile, n, room, prompts, options)
        gone = {}

        def take_turn(start: Start) -> None:
            turns.take(ready[start][0])

        for start, found in measure_in_turn(points, options.rounds, take_turn).items():
            if isinstance(found, requests.RequestException):
                gone[start] = found
            elif isinstance(found, Exception):
                self._skip(start, group[start], str(found))
            else:
                shown = {name: value for name, value in found.items() if name not in UNTOLD}
                say(f"{start.system}: {shown}")
                self.found["results"][start.system]["points"].append(found)
        return gone

    def _skip(self, start: Start, place: Place, why: str) -> None:
        told = f"{place[0] or 'plain'} at {place[1]}: {why}"
        say(f"{start.system}, {told}")
        self.found["results"][start.system]["skipped"].append(told)

    def _tokens_needed(self) -> int:
        """Return the tokens of a KV pool that holds the largest point."""
        options = self.options
        profiles = [*options.profiles] if options.prompts else [None]
        longest = max(self._prompts_of(profile).longest for profile in profiles)
        longest += load_windows.AHEAD * options.to_tokens
        return sharing.pool_tokens(max(options.requests), longest)

    def _prompts_of(self, profile: str | None) -> RandomPrompts | Questions:
        options = self.options
        if not options.prompts:
            return RandomPrompts(options.prompt, options.ids)
        task = Text.of(profile).task
        if task not in self._questions:
            (path,) = [path for path in options.prompts if path.stem == task]
            prompts = real_text.read_prompts([path])
            self._questions[task] = Questions(real_text.to_ids(options.model_path, prompts))
        return self._questions[task]

    def _is_late(self) -> bool:
        elapsed = time.monotonic() - self._began
        return bool(self.options.budget_s) and elapsed > self.options.budget_s

    def write(self, *, picture: bool) -> None:
        text = report(self.found)
        result_files.write(self.found, self.options.out, text, draw if picture else None)


def merge(found: dict[str, Any], path: Path) -> None:
    """Add the results of an earlier call, which must be of the same commit, GPU and model."""
    earlier = result_files.read(path, "--into", "command", "commit", "results")
    fixed = [name for name in found if name not in ("command", "earlier_calls", "results")]
    differing = [
        f"{name} is {earlier.get(name)!r} there and {found[name]!r} here"
        for name in fixed
        if earlier.get(name) != found[name]
    ]
    if differing:
        raise SystemExit(
            f"--into {path}: {'; '.join(differing)}. Measure into another file, without --into."
        )
    call = {name: earlier[name] for name in ("command", "commit")}
    found["earlier_calls"] = [*earlier.get("earlier_calls", ()), call]
    found["results"] = earlier["results"]


def default_out(model_path: str) -> Path:
    name = gpu.gpu_name().split()[-1].lower() if torch.cuda.is_available() else "cpu"
    return ROOT / "benchmarks" / "results" / f"load-{Path(model_path).name}-{name}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    options, unknown = parser.parse_known_args(arguments)
    options.server_args = unknown
    if wrong := complaint(options):
        parser.error(wrong)
    if options.prompts:
        texts = [Text(path.stem, t) for path in options.prompts for t in options.temperatures]
        options.profiles = [text.profile for text in texts]
    choose_pair(options)
    options.out = options.out or options.into or default_out(options.model_path)
    options.ids = batch_load.prompt_ids(options.model_path)
    return options


def choose_pair(options: argparse.Namespace) -> None:
    """Settle on the pair and its load format: as asked, else shapes on a GPU, else the embedded
    pair."""
    if options.model_path is None and (options.shapes or torch.cuda.is_available()):
        shapes = SHAPES / (options.shapes or "gemma4-31b")
        options.model_path, options.draft_model_path = str(shapes), f"{shapes}-draft"
        options.load_format = options.load_format or "dummy"
    elif options.model_path is None:
        options.model_path, options.draft_model_path = str(tiny_target()), str(tiny_drafter())
    options.load_format = options.load_format or "auto"


def main() -> None:
    options = parse()
    if options.picture:
        found = result_files.read(options.picture, "--picture", "command", "results")
        result_files.write(found, options.picture, report(found), draw)
        return
    run = Run(options)
    run.run()
    print(report(run.found))
    if any("error" in result for result in run.found["results"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("load", main))
