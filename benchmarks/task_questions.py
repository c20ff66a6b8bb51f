"""Read a task's questions and ask them through the OpenAI chat endpoint."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai

from benchmarks import result_files
from benchmarks.task_files import file_of
from benchmarks.task_report import Answer
from sglang_dflash.testing.server import ServerProcess

TASKS = ("gsm8k", "math500", "humaneval", "mbpp", "mtbench")
REQUEST_TIMEOUT_S = 1800
# least share of a round in which all requests must have been running to be measured alone
STEADY_SHARE = 0.25

# one point of the measurement: task, concurrency, temperature
Point = tuple[str, int, float]


@dataclass(frozen=True)
class Question:
    id: str
    turns: tuple[str, ...]
    reference: str | None


def known_tasks(folder: Path, unfetched: Mapping[str, str]) -> list[str]:
    """Return the tasks whose files are there; print which are not, and why they could not be
    fetched. Exit if there is none."""
    missing = [task for task in TASKS if not file_of(task, folder).is_file()]
    names = ", ".join(
        f"{task}.jsonl" + (f" ({unfetched[task]})" if task in unfetched else "") for task in missing
    )
    if len(missing) == len(TASKS):
        raise SystemExit(f"{folder} has none of {names}. Pass the folder that has them as --data.")
    if missing:
        print(f"left out, not in {folder}: {names}", flush=True)
    return [task for task in TASKS if task not in missing]


def read_questions(folder: Path, task: str, limit: int) -> list[Question]:
    """Return a task's questions in a fixed shuffled order, so that any prefix is a mixture."""
    path = file_of(task, folder)
    if not path.is_file():
        raise SystemExit(
            f"{path} does not exist. --data must be a folder that contains {task}.jsonl."
        )
    try:
        questions = [
            Question(
                str(row["id"]), tuple(row.get("turns") or [row["prompt"]]), row.get("reference")
            )
            for row in result_files.read_lines(path, "--data:")
        ]
    except KeyError as error:
        raise SystemExit(
            f"--data: {path} has a line without {error}. Each has `id`, and `turns` or `prompt`."
        ) from None
    if not questions:
        raise SystemExit(f"--data: {path} has no questions. Fill it, or leave it out by --tasks.")
    random.Random(task).shuffle(questions)
    return questions[: limit or None]


def take(questions: list[Question], count: int) -> list[Question]:
    """Return the first `count` questions; if there are fewer, they come again under other names."""
    found = []
    for i in range(count):
        again, place = divmod(i, len(questions))
        one = questions[place]
        found.append(replace(one, id=f"{one.id} again {again}") if again else one)
    return found


def ask(
    client: openai.OpenAI,
    question: Question,
    *,
    temperature: float,
    max_tokens: int,
    thinking: bool,
) -> list[Answer]:
    """Ask a question, turn by turn; return an answer per turn."""
    chat: list[Any] = []
    answers = []
    for turn, text in enumerate(question.turns):
        chat.append({"role": "user", "content": text})
        began = time.monotonic()
        reply = client.chat.completions.create(
            model="default",
            messages=chat,
            temperature=temperature,
            max_tokens=max_tokens,
            extra_body={
                "return_meta_info": True,
                "return_token_ids": True,
                "chat_template_kwargs": {"enable_thinking": thinking},
            },
        )
        choice: Any = reply.choices[0]
        content = choice.message.content or ""
        chat.append({"role": "assistant", "content": content})
        answers.append(
            Answer(
                question=question.id,
                turn=turn,
                text=content,
                token_ids=tuple(_token_ids(choice)),
                verify_steps=choice.meta_info.get("spec_verify_ct", 0),
                histogram=tuple(choice.meta_info.get("spec_correct_drafts_histogram", ())),
                is_cut=choice.finish_reason == "length",
                began=began,
                ended=time.monotonic(),
            )
        )
    return answers


def _token_ids(choice: Any) -> list[int]:
    """Return the tokens of a chat completion, under the name that the release of SGLang gives."""
    given = choice.model_dump()
    return given["response_token_ids"] if "response_token_ids" in given else given["token_ids"]


@dataclass(frozen=True)
class Round:
    """One round of questions: all of them at a point's concurrency, once."""

    began: float
    ended: float
    answers: list[Answer]
    failures: list[str]

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def steady_end(self) -> float:
        """The time up to which all of the point's requests were running: when the first of them
        ended without another question to follow. From then on fewer and fewer run, until the
        slowest answer has ended. If that leaves too little, as with no more questions than
        requests, the round is taken as a whole."""
        last_begin = max((answer.began for answer in self.answers if answer.turn == 0), default=0.0)
        ends = {answer.question: answer.ended for answer in self.answers}  # of the last turn
        end = min((end for end in ends.values() if end > last_begin), default=self.ended)
        return end if end - self.began >= STEADY_SHARE * (self.ended - self.began) else self.ended

    @property
    def steady_s(self) -> float:
        return self.steady_end - self.began

    @property
    def steady_tokens(self) -> float:
        """The tokens of that time. An answer's tokens count as evenly spread over its own time."""
        end = self.steady_end
        return sum(
            len(answer.token_ids)
            * max(0.0, min(answer.ended, end) - answer.began)
            / max(answer.ended - answer.began, 1e-9)
            for answer in self.answers
        )


def ask_all(
    server: ServerProcess, questions: Iterable[Question], point: Point, options: argparse.Namespace
) -> Round:
    """Ask the questions at the point's concurrency.

    After a round's share of --seconds-per-point, no further question is started; those in flight
    are finished.
    """
    _, concurrency, temperature = point
    failures: list[str] = []
    client = openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0
    )
    start = time.monotonic()
    seconds = options.seconds_per_point / options.rounds

    def one(question: Question) -> list[Answer]:
        if seconds and time.monotonic() - start > seconds:
            return []
        try:
            return ask(
                client,
                question,
                temperature=temperature,
                max_tokens=options.max_tokens,
                thinking=options.thinking,
            )
        except openai.OpenAIError as error:
            failures.append(f"{question.id}: {error}")
            return []

    with ThreadPoolExecutor(concurrency) as pool:
        answers = [answer for found in pool.map(one, questions) for answer in found]
    return Round(start, time.monotonic(), answers, failures)
