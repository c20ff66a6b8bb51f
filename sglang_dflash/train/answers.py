"""The target's own answers: generating them, and the files that store them.

A file is gzipped JSONL, one answer per line with its token ids exactly as generated. Each group of
answers is appended when it is complete, so an interrupted run resumes after the last group.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from sglang_dflash.train.batches import Example
from sglang_dflash.train.repeats import useful_length

# batch size of an in-process target
ROWS = 16
Item = TypeVar("Item")
# larger files are not appended to
MAX_FILE_BYTES = 12 * 2**20


@dataclass(frozen=True)
class Question:
    key: str
    token_ids: list[int]
    temperature: float  # 0 is greedy
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    key: str
    temperature: float
    finish: str  # "stop" with an end token, "length" without
    prompt_ids: array[int]
    answer_ids: array[int]

    def example(self, max_length: int) -> Example:
        """Return prompt and answer as one training example: a repetition loop is cut to a few
        rounds, then the whole to `max_length`."""
        answer = self.answer_ids
        if self.finish == "length":
            answer = answer[: useful_length(answer)]
        ids = (self.prompt_ids + answer)[:max_length]
        prompt = min(len(self.prompt_ids), len(ids))
        return Example(ids, bytearray(prompt) + bytearray([1]) * (len(ids) - prompt))


# questions -> the token ids of each answer, including the end token
Ask = Callable[[Sequence[Question]], list[list[int]]]


def make_questions(
    prompts: dict[str, list[int]],
    *,
    held_out: int,
    temperatures: dict[float, float],
    per_prompt: int = 1,
    max_new_tokens: int,
    max_length: int,
    seed: int,
) -> list[Question]:
    """Return `per_prompt` questions for each prompt, but one greedy question for each of the first
    `held_out`.

    All prompts are asked once before any is asked again. Sorted by key, the answers are in the
    order of the prompts.
    """
    sampled = {t: share for t, share in temperatures.items() if t > 0} or temperatures
    found = []
    for n in range(per_prompt):
        # greedy answers to one prompt are all the same, so only the first question may be greedy
        mix = sampled if n else temperatures
        for place, (key, ids) in enumerate(prompts.items()):
            if place < held_out and n:
                continue
            drawn = Random(f"{seed}-{key}-{n}").choices(list(mix), list(mix.values()))[0]
            temperature = 0.0 if place < held_out else drawn
            room = min(max_new_tokens, max_length - len(ids))
            found.append(Question(f"{key}.{n}", ids, temperature, room))
    return found


def in_groups(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Split the questions into consecutive groups of `size`."""
    return [list(questions[first : first + size]) for first in range(0, len(questions), size)]


def in_batches(questions: Sequence[Question], *, group: int, rows: int) -> list[list[Question]]:
    """Return batches of at most `rows` questions, bucketed by temperature and length within each
    consecutive group of `group` questions."""
    found = []
    for part in in_groups(questions, group):
        for temperature in sorted({q.temperature for q in part}):
            same = [q for q in part if q.temperature == temperature]
            same.sort(key=lambda q: len(q.token_ids))
            found += in_groups(same, rows)
    return found


def answer_questions(
    parts: Sequence[Sequence[Question]],
    *,
    ask: Ask,
    stop: Collection[int],
    folder: Path,
    seconds: float,
) -> None:
    """Write an answer to every question to `folder`, part by part; stop early after `seconds`."""
    began, tokens = time.monotonic(), 0
    with tqdm(total=sum(map(len, parts)), desc="answers", unit=" prompts", mininterval=1) as bar:
        for part in parts:
            if time.monotonic() - began > seconds:
                bar.write("answers: stopped, because --answer-minutes are over")
                return
            answers = []
            for question, ids in zip(part, ask(part), strict=True):
                finish = "stop" if ids and ids[-1] in stop else "length"
                packed = array("i", question.token_ids), array("i", ids)
                answers.append(Answer(question.key, question.temperature, finish, *packed))
                tokens += len(ids)
            append_answers(folder, answers)
            bar.update(len(part))
            bar.set_postfix_str(f"{tokens / (time.monotonic() - began):.0f} tokens/s")


def watch(items: Sequence[Item], label: str) -> Iterable[Item]:
    return tqdm(items, desc=label, unit=" prompts")


def answer_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("answers-*.jsonl.gz"))


def append_answers(folder: Path, answers: Iterable[Answer]) -> None:
    """Append a group to the newest file, or to a new one if that is full."""
    files = answer_files(folder)
    number = len(files) - 1 if files and files[-1].stat().st_size < MAX_FILE_BYTES else len(files)
    lines = []
    for answer in answers:
        row = asdict(answer)
        row |= {name: row[name].tolist() for name in ("prompt_ids", "answer_ids")}
        lines.append(json.dumps(row, separators=(",", ":")) + "\n")
    # a gzip file may have several members: one per group
    group = gzip.compress("".join(lines).encode())
    with (folder / f"answers-{number:03d}.jsonl.gz").open("ab") as file:
        file.write(group)


def read_answers(paths: Iterable[Path], *, repair: bool = False) -> dict[str, Answer]:
    """Return the answers by key, sorted by key.

    Of a truncated last group, the readable answers are returned; `repair` also rewrites its file
    without the damage, so that further groups can be appended.
    """
    found: dict[str, Answer] = {}
    for path in paths:
        lines = []
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for line in file:
                    answer = _read_answer(line, path)
                    found[answer.key] = answer
                    lines.append(line)
        except UnicodeDecodeError as error:
            raise _not_answers(path, str(error)) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            # a truncated file may hold less than one answer
            if not lines and not (repair and isinstance(error, EOFError)):
                raise ValueError(
                    f"{path} holds no readable answers ({error}). Remove it, or pass files that "
                    "`train` wrote."
                ) from None
            if repair:
                path.write_bytes(gzip.compress("".join(lines).encode()))
    return dict(sorted(found.items()))


def _read_answer(line: str, path: Path) -> Answer:
    try:
        row = json.loads(line)
        ids = {name: array("i", row[name]) for name in ("prompt_ids", "answer_ids")}
        return Answer(**(row | ids))
    # an id beyond 32 bits overflows its array
    except (KeyError, TypeError, OverflowError, json.JSONDecodeError):
        raise _not_answers(path, repr(line[:80])) from None


def _not_answers(path: Path, found: str) -> ValueError:
    return ValueError(
        f"{path} is not a file of answers: {found}. Pass files that `train` wrote, or give the "
        "prompts with --prompts."
    )


def ask_transformers(
    target: PreTrainedModel, *, stop: Collection[int], pad_id: int, seed: int, rows: int = ROWS
) -> Ask:
    """Return an `Ask` that runs `target` in this process, `rows` prompts per batch."""

    def ask(questions: Sequence[Question]) -> list[list[int]]:
        answers: dict[str, list[int]] = {}
        for part in in_batches(questions, group=len(questions), rows=rows):
            # seeded per batch, so that a resumed run samples the same answers
            torch.manual_seed(Random(f"{seed}-{part[0].key}").getrandbits(32))
            answers |= _answer_batch(target, part, stop=sorted(stop), pad_id=pad_id)
        return [answers[q.key] for q in questions]

    return ask


class _Generates(Protocol):
    """The generation mixin of causal LMs, with the return type of this call."""

    def generate(
        self, inputs: Tensor, *, attention_mask: Tensor, generation_config: GenerationConfig
    ) -> Tensor: ...


@torch.no_grad()
def _answer_batch(
    target: PreTrainedModel, questions: Sequence[Question], *, stop: list[int], pad_id: int
) -> dict[str, list[int]]:
    longest = max(len(q.token_ids) for q in questions)
    pads = [longest - len(q.token_ids) for q in questions]
    ids = [[pad_id] * n + q.token_ids for n, q in zip(pads, questions, strict=True)]
    exists = [[0] * n + [1] * (longest - n) for n in pads]
    temperature = questions[0].temperature
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    out = cast(_Generates, target).generate(
        torch.tensor(ids, device=target.device),
        attention_mask=torch.tensor(exists, device=target.device),
        generation_config=GenerationConfig(
            max_new_tokens=max(q.max_new_tokens for q in questions),
            eos_token_id=stop,
            pad_token_id=pad_id,
            do_sample=temperature > 0,
            **sampling,
        ),
    )
    found = {}
    for question, answer in zip(questions, out[:, longest:].tolist(), strict=True):
        ends = [place for place, token in enumerate(answer) if token in stop]
        length = min(question.max_new_tokens, ends[0] + 1 if ends else len(answer))
        found[question.key] = answer[:length]
    return found
