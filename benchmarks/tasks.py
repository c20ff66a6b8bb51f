"""Run a pair on GSM8K, MATH-500, HumanEval, MBPP and MT-Bench: speed, acceptance, exactness.

    python -m benchmarks.tasks --model-path M --draft-model-path D --out results/tasks

The questions are fetched once (task_files.py) and kept in ~/.cache/sglang_dflash/tasks. With --data
DIR they are read from there instead: a TASK.jsonl per task with a question per line, `id`, `prompt`
or `turns` (each turn is asked with the previous answers in the chat), and an optional `reference`.
A task without a file is named and left out, unless --tasks asks for it.

Plain decoding, SGLang's DFLASH and ours get the same requests through the OpenAI chat endpoint, one
system after another; the first two run on the attention backends that SGLang picks.

A point is measured in rounds. Tokens per second are those of the time in which all requests of the
point were running, from the first question of a round until the first request ended that no other
followed: after that a round waits for its slowest answers, which differ from system to system. The
table marks a point whose rounds disagree. With --questions all systems answer the same questions.

Accept length is the tokens committed by verify steps per verify step: prefill's token does not
count. Greedy answers are compared token by token with plain decoding's at the same concurrency; a
later turn only if the earlier ones are equal, since otherwise the chats differ.

Without a GPU, launch/cpu.sh serves the pair, by default the embedded one. Writes OUT.json (command,
commit, versions, GPU) and OUT.md (tables) after every point, so that an interrupted run loses
nothing, and OUT.png at the end. `--side-by-side` starts the systems' servers together, which saves
time. Unknown arguments are passed to the servers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch

from benchmarks import batch_load, result_files, sharing, systems, task_files
from benchmarks.systems import SYSTEMS
from benchmarks.task_questions import (
    TASKS,
    Point,
    Question,
    Round,
    ask_all,
    known_tasks,
    read_questions,
    take,
)
from benchmarks.task_report import Answer, compare, draw, is_right, tables
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.testing.progress import Progress, say
from sglang_dflash.testing.server import ServerProcess
from sglang_dflash.train.prompts import sha256

WARM_UP_TOKENS = 32
PROMPT_TOKENS = 1024  # KV-pool room for a prompt when servers run side by side


def describe_pair(target: str, drafter: str) -> dict[str, str]:
    """Return the pair's names, and the drafter's hash if its folder is local."""
    pair = {"target": result_files.short_path(target), "drafter": result_files.short_path(drafter)}
    weights = Path(drafter) / "model.safetensors"
    return {**pair, "drafter_sha256": sha256(weights)} if weights.is_file() else pair


def meter(server: ServerProcess) -> dict[str, int] | None:
    """Return the server's own counters; None without our DFLASH."""
    ours = server.state().get("sglang_dflash")
    if ours is None:
        return None
    return {name: ours["acceptance"][name] for name in ("verify_steps", "committed_tokens")}


def rate_of(rounds: list[Round]) -> dict[str, Any]:
    """Return the rate while all requests were running, over all rounds, and the rounds' spread as a
    fraction of the slowest."""
    steady_s = sum(r.steady_s for r in rounds)
    rates = sorted(r.steady_tokens / r.steady_s for r in rounds)
    known = len(rates) > 1 and rates[0] > 0
    return {
        "tokens": sum(r.tokens for r in rounds),
        "seconds": round(sum(r.ended - r.began for r in rounds), 3),
        "steady_s": round(steady_s, 3),
        "tokens_per_s": round(sum(r.steady_tokens for r in rounds) / steady_s, 1),
        "spread": round(rates[-1] / rates[0] - 1, 4) if known else None,
    }


def measure(
    server: ServerProcess, questions: list[Question], point: Point, options: argparse.Namespace
) -> tuple[dict[str, Any], list[Answer]]:
    """Return one point's numbers and its answers.

    Time and acceptance cover all rounds, answers only the first.
    """
    before = meter(server)
    rounds = []
    for _ in range(options.rounds):
        server.flush_cache()
        rounds.append(ask_all(server, questions, point, options))
    after = meter(server)
    answers = rounds[0].answers
    everything = [answer for one in rounds for answer in one.answers]
    steps = sum(answer.verify_steps for answer in everything)
    committed = sum(len(answer.token_ids) - 1 for answer in everything if answer.verify_steps)
    histogram = [0] * max((len(answer.histogram) for answer in everything), default=0)
    for answer in everything:
        for accepted, count in enumerate(answer.histogram):
            histogram[accepted] += count
    task, concurrency, temperature = point
    references = {question.id: question.reference for question in questions}
    marks = [is_right(task, answer.text, references[answer.question]) for answer in answers]
    judged = [mark for mark in marks if mark is not None]
    found: dict[str, Any] = {
        "task": task,
        "requests": concurrency,
        "temperature": temperature,
        "questions": len(questions),
        "answered": len({answer.question for answer in answers}),
        "answers": len(answers),
        "cut_at_max_tokens": sum(answer.is_cut for answer in answers),
        "failed": [failure for one in rounds for failure in one.failures],
        "right": f"{sum(judged)} of {len(judged)}" if judged else None,
        **rate_of(rounds),
    }
    if steps:
        found |= {
            "accept_length": round(committed / steps, 4),
            "verify_steps": steps,
            "committed_tokens": committed,
            "steps_by_accepted_drafts": histogram,
        }
    if before is not None and after is not None:
        found["server_meter"] = {name: after[name] - before[name] for name in after}
    return found, answers


class Run:
    """All systems over all points; keeps every answer until the end, for the comparison."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.questions = {
            task: read_questions(options.data, task, options.limit) for task in options.tasks
        }
        self.points: list[Point] = [
            (task, concurrency, temperature)
            for temperature in options.temperature
            for task in options.tasks
            for concurrency in sorted(options.concurrency)
        ]
        self.results: dict[str, dict[str, Any]] = {}
        self._answers: dict[tuple[str, Point], list[Answer]] = {}
        self._about = result_files.provenance(options.commit, hidden=("--data",))
        self._pair = describe_pair(options.model_path, options.draft_model_path)

    def run(self) -> None:
        """Measure all systems, as many servers at once as --side-by-side allows."""
        options, pair = self.options, (self.options.model_path, self.options.draft_model_path)
        several = sharing.at_once(options, *pair, self._tokens_needed())
        with Progress(len(options.systems) * len(self.points), "points") as progress:
            for first in range(0, len(options.systems), several):
                self._run_group(options.systems[first : first + several], progress)

    def _run_group(self, names: list[str], progress: Progress) -> None:
        neighbourly = sharing.server_args(self._tokens_needed()) if len(names) > 1 else []
        starts = {
            name: partial(systems.serve, name, self.options, neighbourly=neighbourly)
            for name in names
        }

        def stop(name: str, server: ServerProcess) -> None:
            systems.stop_server(server, self.options.logs, name)

        for name, server, failed in sharing.serve_all(starts, stop):
            result = self.results[name] = {"points": [], "beside": len(names) - 1}
            try:
                if failed is not None:
                    raise failed
                self._run_system(name, server, result, progress)
            except (RuntimeError, requests.RequestException) as error:
                say(f"{name}: {error}")
                result["error"] = str(error)[-2000:]
            progress.reach(len(self.results) * len(self.points))

    def _run_system(
        self, system: str, server: ServerProcess, result: dict[str, Any], progress: Progress
    ) -> None:
        result["start_s"] = server.start_s
        result["command"] = [result_files.short_path(word) for word in server.command]
        result["attention"] = systems.backends_in_use(server.info())
        say(f"{system}: ready after {server.start_s:.0f} s")
        self._warm_up(server)
        for point in self.points:
            found, answers = measure(server, self._questions_of(point), point, self.options)
            self._answers[system, point] = answers
            result["points"].append(found | self._compare(system, point))
            say(f"{system}: {result['points'][-1]}")
            progress.step()
            self.write(picture=False)

    def _questions_of(self, point: Point) -> list[Question]:
        task, concurrency, _ = point
        found, options = self.questions[task], self.options
        if not options.questions:
            return found
        return take(found, options.questions[options.concurrency.index(concurrency)])

    def _tokens_needed(self) -> int:
        """Return the KV pool size, in tokens, for the longest chats at the highest concurrency."""
        turns = max((len(q.turns) for found in self.questions.values() for q in found), default=1)
        longest = turns * (PROMPT_TOKENS + self.options.max_tokens)
        config = systems.read_config(self.options.model_path)
        limit = config.get("text_config", config).get("max_position_embeddings", longest)
        return sharing.pool_tokens(max(self.options.concurrency), min(longest, limit))

    def _warm_up(self, server: ServerProcess) -> None:
        first = [questions[0] for questions in self.questions.values() if questions]
        short = argparse.Namespace(**vars(self.options))
        short.max_tokens, short.seconds_per_point = WARM_UP_TOKENS, 0
        for temperature in self.options.temperature:
            ask_all(server, first, ("warm-up", len(first), temperature), short)

    def _compare(self, system: str, point: Point) -> dict[str, Any]:
        """Compare with plain decoding at the same point; plain itself with its lowest concurrency,
        which shows what batch size alone changes."""
        task, _, temperature = point
        if temperature > 0:
            return {}
        against = point
        if system == "plain":
            against = (task, min(self.options.concurrency), temperature)
        plain = self._answers.get(("plain", against))
        if plain is None or (system, point) == ("plain", against):
            return {}
        return {"equal_to_plain": compare(plain, self._answers[system, point])}

    def found(self) -> dict[str, Any]:
        return {**self._about, "pair": self._pair, "results": self.results}

    def write(self, *, picture: bool) -> None:
        if self.options.out:
            text = tables(self.results)
            result_files.write(self.found(), self.options.out, text, draw if picture else None)


def known_systems() -> tuple[str, ...]:
    """Return the systems that run here: SGLang's DFLASH does not on a CPU."""
    return SYSTEMS if torch.cuda.is_available() else ("plain", "ours")


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with a TASK.jsonl for each task; default: they are fetched, once, to "
        "~/.cache/sglang_dflash/tasks",
    )
    parser.add_argument(
        "--model-path",
        default=str(tiny_target()),
        help="target: a folder or a model name; default: the embedded target",
    )
    parser.add_argument(
        "--draft-model-path",
        default=str(tiny_drafter()),
        help="drafter: a folder or a model name; default: the embedded drafter",
    )
    systems.add_systems_option(parser, systems.system_name, known_systems())
    systems.add_backend_option(parser)
    parser.add_argument(
        "--tasks",
        nargs="+",
        help=f"{', '.join(TASKS)}, or NAME for NAME.jsonl in --data; default: those named here, "
        "without what cannot be fetched, or what --data does not have",
    )
    batch_load.add_requests_option(parser, name="--concurrency")
    _add_point_options(parser)
    sharing.add_options(parser)
    result_files.add_result_options(parser, picture=True)
    return parser


def _add_point_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=0, help="questions per task; default: 0, all")
    parser.add_argument(
        "--seconds-per-point",
        type=float,
        default=60.0,
        help="seconds of a point, all rounds together, after which no question is started; 0: no "
        "limit; default: %(default)g",
    )
    parser.add_argument(
        "--questions",
        nargs="+",
        type=int,
        help="questions of each task, one number for each of --concurrency, instead of a time",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="repetitions of each point; default: %(default)s"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=4096, help="limit for an answer; default: %(default)s"
    )
    parser.add_argument(
        "--temperature",
        nargs="+",
        type=float,
        default=[0.0],
        help="sampling temperatures; default: 0, greedy",
    )
    parser.add_argument(
        "--thinking", action="store_true", help="enable thinking in the chat template"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    options.server_args = unknown
    strange = [s for s in options.systems if systems.kind_of(s) not in known_systems()]
    if strange:
        parser.error(f"--systems {' '.join(strange)}: SGLang's DFLASH does not run on a CPU")
    if options.questions and len(options.questions) != len(options.concurrency):
        asked, numbers = " ".join(map(str, options.questions)), len(options.concurrency)
        parser.error(f"--questions {asked}: pass {numbers} numbers, as many as --concurrency has")
    if options.questions:
        options.seconds_per_point = 0
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: pass at least 1")
    if options.picture is None:
        find_questions(options)
    return options


def find_questions(options: argparse.Namespace) -> None:
    """Fetch what is asked for, unless --data has it, and settle on the tasks."""
    unfetched: dict[str, str] = {}
    if options.data is None:
        options.data = task_files.FOLDER
        refuse_unknown(options.tasks or (), options.data)
        unfetched = task_files.fetch(options.tasks or TASKS, options.data)
    if options.tasks is None:
        options.tasks = known_tasks(options.data, unfetched)
    elif failed := [task for task in options.tasks if task in unfetched]:
        why = ", ".join(f"{task} ({unfetched[task]})" for task in failed)
        raise SystemExit(
            f"--tasks: not fetched: {why}. Pass the folder with their files as --data."
        )


def refuse_unknown(asked: Iterable[str], folder: Path) -> None:
    """Exit if a task is neither known nor one's own, whose file is in the folder."""
    for task in asked:
        if task not in TASKS and not task_files.file_of(task, folder).is_file():
            raise SystemExit(
                f"--tasks: there is no task named {task}. Pass some of: {', '.join(TASKS)}. To add "
                f"your own, pass the folder with its {task}.jsonl as --data DIR."
            )


def main() -> None:
    options = parse()
    if options.picture:
        result_files.rewrite(options.picture, tables, draw)
        return
    run = Run(options)
    run.run()
    print(tables(run.results))
    run.write(picture=True)
    failed = [name for name, result in run.results.items() if "error" in result]
    if failed or any(p["failed"] for r in run.results.values() for p in r["points"]):
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("tasks", main))
